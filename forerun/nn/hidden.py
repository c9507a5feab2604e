from forerun.nn.heads import *  # noqa: F403 - moved
from forerun.nn.heads import HeadLayer, HiddenConfig, HiddenDrafter, MedusaBlock, hot_set  # noqa: F401
