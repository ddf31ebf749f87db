"""What `quantize` prints: the layers, what was skipped, notes, time and memory, by the record in the folder."""

from collections import Counter
from pathlib import Path
from typing import Any

from rich.console import Console

from .format import duration, size
from .overrides import Chosen
from .table import columns


def show(folder: Path, record: dict[str, Any], seconds: float, chosen: Chosen | None = None) -> None:
    """`seconds`: of the whole, with the search for overrides."""
    console = Console(highlight=False, markup=False)
    layers = record["layers"]
    if chosen is not None:
        _show_units(chosen, console)
    table = columns("layers", "n", "bits", "group", "MB stored", "error", "worst", "in block")
    for kind in dict.fromkeys(_kind(layer["name"]) for layer in layers):
        of = [layer for layer in layers if _kind(layer["name"]) == kind]
        worst = max(of, key=lambda layer: layer["error"])
        table.add_row(
            kind,
            str(len(of)),
            "/".join(str(bits) for bits in sorted({layer["bits"] for layer in of})),
            "/".join(str(group) for group in sorted({layer["group_size"] for layer in of})),
            f"{sum(layer['nbytes'] for layer in of) / 1e6:.2f}",
            f"{sum(layer['error'] for layer in of) / len(of):.5f}",
            f"{worst['error']:.5f}",
            worst["name"].split(".")[2],
        )
    console.print(table)
    lost = "weights" if record["calibration"] is None else "outputs on the calibration text"
    told = f"error: what is lost of the layers' {lost}, squared, as a share of 1: the mean and the worst layer's"
    console.print(told, soft_wrap=True)
    told = f"{len(layers)} layers quantised, {len(record['skipped'])} left as they are"
    console.print(f"{told}: {record['share']:.1%} of the weights in the blocks", soft_wrap=True)
    for why, n in Counter(record["skipped"].values()).items():
        console.print(f"skipped, {n} layers: {why}", soft_wrap=True)
    for note, n in Counter(note for layer in layers for note in layer["notes"]).items():
        console.print(f"note, of {n} layers: {note}", soft_wrap=True)
    for warning in record["warnings"]:
        console.print(f"warning: {warning}", soft_wrap=True)
    peak = "unknown" if record["peak_bytes"] is None else size(float(record["peak_bytes"]))
    before = f", {record['resumed']} blocks of them done before" if record["resumed"] else ""
    made = "" if chosen is None else f", {duration(record['seconds'])} of it for the weights"
    console.print(f"{duration(seconds)}{made}{before}; peak memory of the process {peak}", soft_wrap=True)
    whole = sum(file.stat().st_size for file in folder.iterdir() if file.suffix in (".safetensors", ".gguf")) / 1e6
    of = sum(layer["nbytes"] for layer in layers) / 1e6
    console.print(f"{whole:.2f} MB of weights, {of:.2f} of them the quantised layers'", soft_wrap=True)
    console.print(f"written to {folder}; model.path={folder}", soft_wrap=True)


def _kind(name: str) -> str:
    return name.split(".", 3)[-1]


def _show_units(chosen: Chosen, console: Console) -> None:
    table = columns("what goes to 8 bits", "KL left", "recovered", "MB more", "KL per MB", "")
    for unit in chosen.units:
        table.add_row(
            unit.label,
            f"{unit.kl:.3g}",
            f"{unit.recovered:+.3g}",
            f"{unit.more / 1e6:.2f}",
            f"{1e6 * unit.recovered / unit.more:+.3g}",
            "chosen" if unit in chosen.taken else "",
        )
    console.print(table)
    held = columns("on text that is not calibrated on", "MB stored", "bits a weight", "KL")
    for trial in chosen.trials:
        held.add_row(trial.label, f"{trial.nbytes / 1e6:.2f}", f"{trial.bits:.2f}", f"{trial.kl:.4g}")
    console.print(held)
