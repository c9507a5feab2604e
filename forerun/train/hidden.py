from forerun.train.heads import HeadRecipe as Recipe  # noqa: F401 - moved
from forerun.train.heads import train_head as train_hidden  # noqa: F401
