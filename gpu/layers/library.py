"""A convolution layer's passes by cuDNN, as far as it has plans for them."""

from __future__ import annotations

from typing import Any

from gpu.cudnn import IM2COL, PASSES, Convolution, ConvolutionShape, Cudnn, NoPlanError, Pass
from gpu.layers.base import Array, Context, Shape


class LibraryConvolution:
    """The plans of one layer. ``algorithms``: by pass, the plan's name, or im2col + GEMM and why."""

    def __init__(self, context: Context, shape: ConvolutionShape, bottoms: int) -> None:
        self.shape = shape
        self._context = context
        self._plans: dict[Pass, Convolution] = {}
        self.algorithms: dict[str, str] = {}
        for direction in PASSES:
            reason = self._find(direction, bottoms)
            self.algorithms[direction] = f"{IM2COL}: {reason}" if reason else f"cuDNN {self._plans[direction].name}"

    def _find(self, direction: Pass, bottoms: int) -> str:
        cudnn = self._context.cudnn
        if not isinstance(cudnn, Cudnn):
            return str(cudnn)
        if len(self.shape.stride) not in (2, 3):
            return f"{len(self.shape.stride)} spatial axes"
        if 0 in self.shape.x:
            return "an empty batch"
        if bottoms > 1 and direction == "weights":
            return "several inputs add to one gradient"
        try:
            self._plans[direction] = cudnn.convolution(direction, self.shape)
        except NoPlanError as error:
            return str(error).splitlines()[0]
        return ""

    @property
    def served(self) -> tuple[Pass, ...]:
        """The passes that have a plan."""
        return tuple(self._plans)

    @property
    def whole(self) -> bool:
        """Whether every pass has a plan, so that no windows are ever unrolled."""
        return len(self._plans) == len(PASSES)

    @property
    def room(self) -> Shape:
        """Shape, in float32 values, of the work space."""
        return (max((-(-plan.workspace // 4) for plan in self._plans.values()), default=0) + 1,)

    def run(self, direction: Pass, first: Array, second: Array, result: Array) -> bool:
        """Do a pass; False where it has no plan. Arguments as :meth:`gpu.cudnn.Convolution.run` takes them."""
        plan: Any = self._plans.get(direction)
        if plan is None:
            return False
        (workspace,) = self._context.scratch.arrays(self.room)
        plan.run(first, second, result, workspace)
        return True
