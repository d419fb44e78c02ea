"""Run a forward in training with every dropout an identity where it is called: nothing of the module is set.

    if self.training and self.rate:                             # the branch that training takes is taken
        weights = F.dropout(weights, self.rate)                 # and returns the weights

The dropout of torch's attention functions is switched off in their arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

_DROPOUT = "dropout"
"""Functions with this in their names drop entries of their first argument."""
_WITH_MASK = ("native_", "_")
"""Functions of dropout that return their mask too have names that begin so."""
_DRAWS = frozenset(("rand", "rand_like", "randn", "randn_like", "uniform_", "normal_", "bernoulli", "bernoulli_"))
"""Functions that draw random numbers, by which code drops by hand."""
_RATE = 4
"""The place of the rate of dropout in the arguments of `scaled_dot_product_attention`."""


class WithoutDropout(TorchFunctionMode):
    """Makes every dropout of torch return its input in the `with` block."""

    def __init__(self) -> None:
        super().__init__()
        self.has_drawn = False
        """Whether something else drew random numbers."""

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Sequence[Any],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Return the result of a function, without what it would drop."""
        given = dict(kwargs or {})
        name = getattr(function, "__name__", "")
        if _DROPOUT in name and not name.startswith(_WITH_MASK):
            return args[0] if args else given["input"]
        if function is F.multi_head_attention_forward:
            given["training"] = False
        if function is F.scaled_dot_product_attention:
            args = (*args[:_RATE], 0.0, *args[_RATE + 1 :]) if len(args) > _RATE else args
            given.pop("dropout_p", None)
        self.has_drawn = self.has_drawn or name in _DRAWS
        return function(*args, **given)
