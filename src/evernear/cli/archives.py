"""The output of ``evernear registry show FILE``: the contents of an untrusted archive."""

from pathlib import Path
from typing import TYPE_CHECKING

from evernear.common.output import print_json, print_line, printable, quantity

if TYPE_CHECKING:
    from evernear.release.records import Description, Signature

SHOWN_LABELS = 50


def show_archive(archive: Path, as_json: bool) -> None:
    """Print the signature, preprocessing, index, labels, metrics and lineage of a ``.mar``."""
    from evernear.release.records import describe
    from evernear.serving import HANDLER

    description = describe(archive, HANDLER)
    if as_json:
        print_json(description)
    else:
        _print_description(description)


def _print_description(description: "Description") -> None:
    from evernear.index.description import describe_threshold

    index, lineage, shape = description.index, description.lineage, description.preprocessing
    size_mb = description.archive_size_bytes / 1e6
    print_line(f"release {description.version}, {size_mb:.1f} MB, sha256 {description.archive_sha256}")
    _print_signature("POST /predictions/MODEL", description.request)
    _print_signature("network", description.network)
    _heading("preprocessing")
    print_line(
        f"  {shape.height_px} x {shape.width_px} pixels, {'grayscale' if shape.channels == 1 else 'RGB'}, "
        f"{shape.interpolation}, 16-bit images read as {shape.bit_depth} bits; in the network: mean "
        f"{_numbers(shape.mean)}, std {_numbers(shape.std)}"
    )
    _heading("index")
    search = f" ({safe(index.search)})" if index.search else ""
    print_line(
        f"  {safe(index.factory)}{search}, {quantity(index.size, 'vector')} of {index.dim}, metric {index.metric}"
    )
    if index.reason:
        print_line(f"  chosen because {safe(index.reason)}")
    print_line(f"  label by {index.label_by} of {index.k}, {describe_threshold(index.threshold)}")
    _heading(f"labels ({len(description.labels)})")
    more = f" and {len(description.labels) - SHOWN_LABELS:,} more" if len(description.labels) > SHOWN_LABELS else ""
    print_line("  " + " ".join(safe(label) for label in description.labels[:SHOWN_LABELS]) + more)
    _heading("lineage")
    for name, value in lineage.model_dump(mode="json", exclude={"own_handler"}).items():
        print_line(f"  {name.replace('_', ' '):<18} {safe(str(value or '-'))}")
    handler = "the handler of this evernear version" if lineage.own_handler else "custom code; TorchServe would run it"
    print_line(f"  {'handler':<18} {handler}")
    _heading("training settings")
    for name, value in description.training.items():
        print_line(f"  {safe(name):<28} {safe(str(value))}")
    _heading(f"verdict: {'promote' if description.verdict.promote else 'hold'}")
    for reason in description.verdict.reasons:
        print_line(f"  - {safe(reason, 500)}")
    _heading("metrics")
    for name, value in sorted(description.metrics.items()):
        print_line(f"  {safe(name):<28} {value:g}")


def _print_signature(title: str, signature: "Signature") -> None:
    _heading(title)
    for side, values in (("in", signature.inputs), ("out", signature.outputs)):
        for value in values:
            shape = str(value.shape).replace("'", "")
            print_line(f"  {side:<4}{value.name:<16} {value.dtype:<8} {shape:<16} {safe(value.meaning)}")


def _numbers(values: tuple[float, ...]) -> str:
    return " ".join(f"{value:.4f}" for value in values)


def safe(text: str, limit: int = 100) -> str:
    return printable(text, limit)


def _heading(text: str) -> None:
    print_line()
    print_line(text)
