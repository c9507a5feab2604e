from forerun.runtime.heads import LARGEST_TABLE, HiddenLM, head_rows  # noqa: F401 - moved
