"""Every environment variable of torchpaged, in one table: `torchpaged.custom_ops.variables`, where the ops can read it too."""

from torchpaged.custom_ops.variables import VARIABLES, Variable, get

__all__ = ["VARIABLES", "Variable", "get"]
