"""What a format is, and a checkpoint's quantised layers read through one."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from ..codes import Codes

Shape = tuple[int, ...]


@runtime_checkable
class Format(Protocol):
    """`config` is what config.json has as quantization_config. A layer's name is that of its weight, less `.weight`."""

    @property
    def name(self) -> str:
        """quant_method in config.json."""

    def layers(self, shapes: Mapping[str, Shape], config: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
        """Which layers are quantised, and their weights' [N, K], from the tensors' shapes. Refuses, in one line, what
        the format's own rules exclude: a tensor that is missing or of another shape, bits that are not read."""

    def read(self, layer: str, tensor: Callable[[str], Tensor], config: Mapping[str, Any]) -> Codes: ...
    def write(self, layer: str, codes: Codes) -> dict[str, Tensor]:
        """The tensors of a layer. Refuses codes that the format does not express."""

    def config(self, layers: Mapping[str, Codes]) -> dict[str, Any]:
        """quantization_config of a checkpoint with these layers."""


class QuantisedLayers(Mapping[str, Codes]):
    """Codes by layer, each read when it is asked for. `shapes`: the weights' [N, K]."""

    def __init__(
        self,
        form: Format,
        config: Mapping[str, Any],
        tensor: Callable[[str], Tensor],
        shapes: Mapping[str, tuple[int, int]],
    ) -> None:
        self.form, self.shapes = form, shapes
        self._config, self._tensor = config, tensor

    def __getitem__(self, layer: str) -> Codes:
        if layer not in self.shapes:
            raise KeyError(layer)
        return self.form.read(layer, self._tensor, self._config)

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)
