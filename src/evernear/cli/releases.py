"""``evernear registry``: the releases in a store, and the champion pointer."""

import sys
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from evernear.cli.options import (
    JsonOption,
    group,
    options_of,
    registry_settings,
    registry_settings_anywhere,
    releases,
    require_workdir,
)
from evernear.common.output import print_json, print_line, print_table, printable, quantity
from evernear.errors import IntegrityError, SettingsError
from evernear.evaluation.headline import headline
from evernear.settings import Settings

if TYPE_CHECKING:
    from evernear.deployment import Deployment
    from evernear.release.promotions import Champion
    from evernear.release.records import Description, Record, Signature
    from evernear.release.registry import Registry

app = group("registry", "List, show, promote, roll back and restore releases, and move the anchor.")
VersionArgument = Annotated[str, typer.Argument(metavar="VERSION", autocompletion=releases)]
SHOWN_LABELS = 50
WhyOption = Annotated[str, typer.Option("--why", metavar="TEXT", help="Reason for the history.")]


@wraps(registry_settings)
def registry_of(*args: Any, **options: Any) -> "Registry":
    from evernear.common.store.current import current_store
    from evernear.release.registry import Registry

    return Registry(current_store(registry_settings(*args, **options).store_uri))


def registry_beside(release: str, settings: Settings) -> "Registry":
    """The registry, whose working directory must exist unless ``release`` is a file."""
    from evernear.common.store.current import current_store
    from evernear.release.registry import Registry

    if not Path(release).is_file() and not settings.store:
        require_workdir(settings.workdir)
    return Registry(current_store(settings.store_uri))


@app.command(name="list")
@options_of(registry_of)
def list_(
    registry: "Registry",
    history: Annotated[
        bool,
        typer.Option(
            "--history",
            help="Show every promotion, settings change, anchor move and rollback instead, oldest first.",
        ),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """List all releases, oldest first, with their states: champion, promoted (once), held, or not
    promoted. With --history, show when, how, by whom and why the champion changed."""
    if history:
        _print_history(registry, as_json)
        return
    records, faults = registry.records()
    try:
        champion = registry.champion()
        promoted = {promotion.version for promotion in registry.history()}
    except IntegrityError as error:
        champion, promoted = None, set[str]()
        print_line(f"WARNING: {error}", sys.stderr)
    releases = [_fields(record, champion) for record in records.values()]
    for release in releases:
        release["state"] = _state(release, promoted)
    for fault in faults.values():
        print_line(f"WARNING: {fault}", sys.stderr)
    if as_json:
        print_json(releases)
        return
    rows = [
        (
            release["version"],
            release["created"][:16].replace("T", " "),
            headline(release["metrics"]) or "-",
            release["state"],
            release["parent"] or "-",
            f"{release['archive_size_bytes'] / 1e6:.1f} MB",
        )
        for release in releases
    ]
    rows += [(version, "-", "-", "damaged", "-", "-") for version in faults]
    if not rows:
        print_line(f"No release is in {registry.uri} yet.", sys.stderr)
    print_table(("version", "created (UTC)", "test images", "state", "parent", "size"), rows)


@app.command()
@options_of(registry_settings_anywhere)
def show(
    settings: Settings,
    release: Annotated[
        str,
        typer.Argument(metavar="RELEASE", help="A version in the registry, or a .mar file.", autocompletion=releases),
    ],
    as_json: JsonOption = False,
) -> None:
    """Show the data, network, code, verdict, metrics and parts of a release, even if it was pruned.
    For a .mar file, also show its signature, preprocessing and index, without running its code."""
    from evernear.release.manifest import is_version

    registry = registry_beside(release, settings)
    if Path(release).is_file() or not is_version(release):
        _show_archive(Path(release), as_json)
    else:
        _show_record(release, registry, as_json)


def _show_archive(archive: Path, as_json: bool) -> None:
    """The archive is untrusted, and its code is not run."""
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
    print_line(f"  {describe_threshold(index.threshold)}, {index.k} neighbors in an answer")
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


def _show_record(version: str, registry: "Registry", as_json: bool) -> None:
    from evernear.index.description import describe_threshold

    fields: dict[str, Any] = _fields(registry.get(version, include_pruned=True), registry.champion())
    fields["pruned"] = version not in registry.list()
    if as_json:
        print_json(fields)
        return
    verdict = fields.pop("verdict")
    metrics, labels, parts = fields.pop("metrics"), fields.pop("labels"), fields.pop("parts")
    fields["threshold"] = describe_threshold(fields["threshold"])
    training = fields.pop("training") or {}
    for key, value in fields.items():
        print_line(f"{key.replace('_', ' '):<20} {_format(value)}")
    shown = labels if len(labels) <= 20 else (*labels[:20], "...")
    print_line(f"{'labels':<20} {len(labels)}: {' '.join(shown)}")
    if verdict:
        print_line(f"{'verdict':<20} {'promote' if verdict['promote'] else 'hold'}")
        for reason in verdict["reasons"]:
            print_line(f"  - {reason}")
    print_line("training settings" if training else f"{'training settings':<20} -")
    for name, value in training.items():
        print_line(f"  {name:<28} {_format(value)}")
    print_line("metrics")
    for name, value in sorted(metrics.items()):
        print_line(f"  {name:<28} {value:g}")
    print_line("parts")
    for name, part in sorted(parts.items()):
        print_line(f"  {name:<20} {part['sha256']} {part['size_bytes']:>12,} bytes")


@app.command()
@options_of(registry_of)
def anchor(
    registry: "Registry",
    version: Annotated[str | None, typer.Argument(metavar="[VERSION]", help="The new anchor. [print it]")] = None,
    why: WhyOption = "",
    as_json: JsonOption = False,
) -> None:
    """Print the anchor, a release with which the gate also compares every candidate, or move the
    anchor to VERSION. Moving the anchor accepts the losses of VERSION, and requires --why."""
    from evernear.release.promotions import Cause

    current = registry.require_champion()
    if version is not None:
        if not why.strip():
            raise SettingsError("Moving the anchor needs a reason; add --why 'the reason'.")
        current = registry.set_anchor(version, current, Cause.of_this_process(why))
    if as_json:
        print_json({"anchor": current.anchor, "champion": current.version})
    else:
        print_line(current.anchor if version is None else f"Release {current.anchor} is the anchor now.")


@app.command()
@options_of(registry_settings)
def promote(
    settings: Settings,
    version: VersionArgument,
    why: WhyOption = "",
    force: Annotated[
        bool, typer.Option("--force", help="Promote even if the verdict is hold. Requires --why.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Make a release the champion. A running server first loads the release, and must pass the
    release's stored queries.

    In Kubernetes, the champion itself is rolled out again with changed settings, such as image,
    memory or replicas.
    """
    from evernear.deployment import promote_release
    from evernear.release.promotions import Cause

    _print(promote_release(version, settings, force=force, cause=Cause.of_this_process(why)), settings, as_json)


@app.command()
@options_of(registry_settings)
def rollback(
    settings: Settings,
    why: WhyOption = "",
    as_json: JsonOption = False,
) -> None:
    """Make the previous champion the champion again. Repeat the command to go back further."""
    from evernear.deployment import roll_back
    from evernear.release.promotions import Cause

    _print(roll_back(settings, cause=Cause.of_this_process(why)), settings, as_json)


@app.command()
@options_of(registry_of)
def restore(
    registry: "Registry",
    version: Annotated[
        str | None, typer.Argument(metavar="[VERSION]", help="The champion. [the newest one in the history]")
    ] = None,
    why: WhyOption = "",
) -> None:
    """Rewrite the lost or damaged champion pointer from the history. Servers are not changed."""
    from evernear.release.promotions import Cause

    champion = registry.restore(version, Cause.of_this_process(why)).promotion
    print_line(
        f"Release {champion.version} is the champion again, as promotion {champion.number} of the history; `evernear "
        "serve` loads it if the server runs another one."
    )


def _print_history(registry: "Registry", as_json: bool) -> None:
    promotions = list(registry.history())
    if as_json:
        print_json(promotions)
        return
    rows = [
        (
            f"{p.since:%Y-%m-%d %H:%M:%S}",
            p.version,
            p.previous or "-",
            p.anchor or p.version,
            p.how,
            p.by,
            p.run,
            p.why,
        )
        for p in promotions
    ]
    if not rows:
        print_line(f"No release has been promoted in {registry.uri} yet.", sys.stderr)
    print_table(("since (UTC)", "version", "previous", "anchor", "how", "by", "run", "why"), rows)


def _fields(record: "Record", champion: "Champion | None") -> dict[str, Any]:
    """The fields of a record and its manifest, in one flat dictionary."""
    tree = record.model_dump(mode="json")
    manifest: dict[str, Any] = tree.pop("manifest")
    return manifest | tree | {"champion": champion is not None and champion.version == record.manifest.version}


def _state(release: dict[str, Any], promoted: set[str]) -> str:
    """One of "champion", "promoted" (once), "held" (by the gate) and "not promoted"."""
    if release["champion"]:
        return "champion"
    if release["version"] in promoted:
        return "promoted"
    return "held" if release["verdict"] and not release["verdict"]["promote"] else "not promoted"


def _print(deployed: "Deployment", settings: Settings, as_json: bool) -> None:
    if as_json:
        print_json(deployed)
        return
    from evernear.common.store import open_store
    from evernear.release.registry import Registry

    target = ""
    if deployed.previous and Registry(open_store(settings.store_uri)).is_published(deployed.previous):
        target = f" A rollback would restore {deployed.previous}."
    elif deployed.previous:
        target = f" No rollback is possible: {deployed.previous}, the champion before it, was pruned."
    print_line(f"Release {deployed.version} {deployed.state()}.{target}")


def _format(value: Any) -> str:
    match value:
        case None | "":
            return "-"
        case bool():
            return "yes" if value else "no"
        case dict():
            return ", ".join(f"{key} {_format(inner)}" for key, inner in value.items())
        case list():
            return " ".join(_format(inner) for inner in value)
        case _:
            return str(value)
