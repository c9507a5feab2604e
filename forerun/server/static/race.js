// The race of two answers: with drafts, and by plain decoding. The server answers one after the other, so that neither
// slows the other down; while it decodes plainly, the first answer runs again beside it as it ran before.

import { RESTS, rests } from "./answer_view.js";
import { isOpen } from "./conversation.js";
import { button, element, plural, seconds } from "./dom.js";

const LEAST_TOKENS = 4; // of each answer, before a ratio is shown

/** Returns how many tokens an answer had `time` ms after it was asked for. */
function tokensAt(answer, time) {
  if (time >= answer.time) return answer.tokens;
  let tokens = 0;
  for (const step of answer.steps) {
    if (step.at > time) break;
    tokens += (step.accepted ?? 0) + 1;
  }
  return tokens;
}

/** Returns how many times as many tokens per second the fast answer had, `time` ms after the start; or null. */
function ratio([fast, plain], time) {
  const rate = (answer) => tokensAt(answer, time) / Math.max(1, Math.min(time, answer.time));
  const isEarly = [fast, plain].some((answer) => tokensAt(answer, time) < Math.min(LEAST_TOKENS, answer.tokens || 1));
  return isEarly ? null : rate(fast) / rate(plain);
}

/** Returns a sentence on whether both answers are equal, and how their times compare. */
function verdict([fast, plain], temperature) {
  if (fast.state !== "done" || plain.state !== "done") return "Not compared: not both answers came to their end.";
  const times = `${((fast.tokens / fast.time) * (plain.time / plain.tokens)).toFixed(2)} times the tokens/s`;
  const gain = rests(fast) ? RESTS : fast.drafted ? times : "nothing was drafted";
  const both = `With drafts it took ${seconds(fast.time)}, then plainly ${seconds(plain.time)}: ${gain}.`;
  if (fast.text === plain.text) return `The texts are equal: ${plural(fast.text.length, "character")}. ${both}`;
  if (temperature > 0) return `The texts differ, as samples do: one distribution, two draws. ${both}`;
  let same = 0;
  while (fast.text[same] === plain.text[same]) same += 1;
  return `The texts differ from character ${same + 1} on. ${both}`;
}

/** The elements of a race. */
export class Race {
  constructor(turn) {
    this.answers = turn.answers;
    this.temperature = turn.settings.temperature;
    this.box = element("div", "race");
    this.box.setAttribute("role", "group");
    this.box.setAttribute("aria-label", "Race with plain decoding");
    this.number = element("b", "ratio", "–");
    this.verdict = element("p", "verdict");
    this.again = button("Run the clocks again", () => this.#replay(), "quiet");
    this.lanes = ["With drafts", "Plain"].map((name) => this.#lane(name));
    this.score = element("p", "score");
    this.score.append(this.number, element("span", "", "the tokens per second"));
    const tracks = element("div", "tracks");
    tracks.append(...this.lanes.map((lane) => lane.box));
    this.box.append(tracks, this.score, this.verdict, this.again);
    this.frame = 0;
  }

  #lane(name) {
    const box = element("div", "lane");
    const track = element("span", "track");
    const done = element("span", "done");
    const clock = element("span", "clock", "–");
    const mark = element("span", "mark");
    mark.hidden = true;
    track.append(done, mark);
    box.append(element("span", "name", name), track, clock);
    return { box, done, mark, clock };
  }

  /** Shows the race as it is `now`, a time of `performance.now()`, and once more at its end. */
  draw(startedAt, now) {
    const [fast, plain] = this.answers;
    const isOver = !isOpen(fast) && !isOpen(plain);
    const isCompared = isOver && fast.state === "done" && plain.state === "done";
    this.box.classList.toggle("over", isOver);
    this.again.hidden = !isCompared;
    this.score.hidden = isOver && !isCompared;
    this.verdict.hidden = !isOver;
    if (isOver) this.verdict.textContent = verdict(this.answers, this.temperature);
    if (isOver && this.frame) return; // the clocks run again
    this.#show(isOver ? Infinity : now - startedAt, plain.state === "waiting" && !isOver);
  }

  #show(time, isFirstLap) {
    const [fast, plain] = this.answers;
    const length = Math.max(fast.tokens, plain.tokens, 1);
    this.#showLane(this.lanes[0], fast, time, isFirstLap ? Infinity : length); // whose length nobody knows yet
    if (isFirstLap) {
      this.lanes[1].clock.textContent = "waits";
      return;
    }
    this.#showLane(this.lanes[1], plain, time, length);
    this.#showMark(time, length);
    const isShown = fast.tokens > 0 && plain.tokens > 0;
    const times = isShown ? ratio(this.answers, Math.min(time, Math.max(fast.time, plain.time))) : null;
    this.number.textContent = times === null ? "–" : `${times.toFixed(times < 9.95 ? 2 : 1)}×`;
  }

  /** Marks where plain decoding was when the other answer was home. */
  #showMark(time, length) {
    const [fast, plain] = this.answers;
    const { mark } = this.lanes[1];
    const at = tokensAt(plain, fast.time) / length;
    mark.hidden = fast.state !== "done" || time < fast.time || at >= 1;
    mark.style.setProperty("--at", String(at));
    mark.title = `Here when the answer with drafts had ended, after ${seconds(fast.time)}`;
  }

  #showLane({ box, done, clock }, answer, time, length) {
    const isRunning = answer.state === "running";
    const at = isRunning ? time : Math.min(time, answer.time);
    const tokens = tokensAt(answer, isRunning ? Infinity : at);
    done.style.setProperty("--done", String(Math.min(1, tokens / length)));
    clock.textContent = seconds(at);
    box.classList.toggle("home", !isRunning && time >= answer.time);
  }

  #replay() {
    cancelAnimationFrame(this.frame);
    const startedAt = performance.now();
    const run = (now) => {
      const time = now - startedAt;
      this.#show(time, false);
      const isOver = time >= Math.max(...this.answers.map((answer) => answer.time));
      this.frame = isOver ? 0 : requestAnimationFrame(run);
    };
    this.frame = requestAnimationFrame(run);
  }
}
