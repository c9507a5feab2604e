"""Whether a step drafts, who drafts it, and how much.

All three follow from one table, `Costs` (`cost_model`): ms of forwards by rows, nodes and context.
It is measured once, and corrected by what every guarded step takes (`corrected_costs`). So planners
ask for the present table each time (`CostSource`).

- Whether: a drafter declares its costs by a `planner`. `forecast(drafter, StepSituation(...))` is
  the one question, and `Forecast.pays` the one definition (`forecast`). Drafters without a planner
  are tried. What a table cannot know is measured: a `Guard` times every step and ends drafts that
  lose (`guard`). What they may lose in all is one bounded balance, the guard's `LossAccount`.
  `GuardedDrafter` asks the guard, then the forecast.
  `api.build` wraps the drafter of an engine in one, unless guards are turned off. So in a step
  nothing is drafted for a sequence if
    1. the guard is paused (`Guard.paused`),
    2. the guard measures a plain step: the first two, the first one of a number of rows, and a few
       later ones (`Guard.drafts`),
    3. the forecast says that drafts of this step, or after the reading of this text, do not pay, or
    4. the drafter reads another prompt at present, and has not read this one;
  else the drafter is asked, and may find nothing (`Drafter.propose`).
- Who: `SourceChooser` weighs suffixes, another drafter and nobody for each row (`source_chooser`).
  `PhraseChooser` weighs forwards with phrases and without.
- How much: `LengthChooser` gives the length of a chain (`length`), and `TreePlanner`, which
  forecasts too, a step's `TreePlan` (`tree_plan`). `stop_rules` has the protocol of the rules that
  end a chain, and the rules by plain bounds. Pacer's, which asks a trained layer, is in
  `forerun.drafters`.

A step of `hybrid` thus asks a guard, a source chooser and the planner of the other drafter.
`SuffixPlanner` says how probable a token must be to be worth its place, and where none can be
(`suffix_plan`). There no row is asked about and no text is read.
Nothing here runs a model. `stop_rules` needs torch and `tree_plan` NumPy; the rest needs neither.
"""
