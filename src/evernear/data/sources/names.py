"""Classify files and folders by their names, and files without an image suffix by a few bytes."""

import os
import posixpath
import re
from mimetypes import MimeTypes
from pathlib import Path
from typing import Final

from evernear.common.disk import disk_errors
from evernear.common.outputs import MARKER
from evernear.data.image_file import SIGNATURE_SIZE_BYTES, has_image_signature

OWN_FOLDER = "_evernear"
"""The folder in which ``batch-predict`` keeps the plan for its output."""
IMAGE_SUFFIXES = frozenset(
    {".apng", ".jfi", ".jfif", ".jif", ".jpe", ".jpeg", ".jpg", ".mpo", ".pjpeg", ".png", ".webp"}
    | {".avif", ".bmp", ".dib", ".gif", ".heic", ".heif", ".hif", ".j2k", ".jp2", ".jxl", ".tga", ".tif", ".tiff"}
    | {".pbm", ".pgm", ".pnm", ".ppm"}
)
"""File name suffixes for images in supported and unsupported formats."""
_LITTER = frozenset(
    {"@eadir", "@recently-snapshot", "@recycle", "@tmp", "#recycle", "#snapshot", ".@__thumb"}  # Synology, QNAP
    | {"__macosx", ".appledouble", ".apdisk", ".ds_store", ".fseventsd", ".spotlight-v100", ".trashes", "icon\r"}
    | {"network trash folder", "temporary items", ".temporaryitems"}  # macOS on a file server
    | {"$recycle.bin", "system volume information", "desktop.ini", "ehthumbs.db", "thumbs.db"}  # Windows
    | {"lost+found", ".directory", ".snapshot", ".snapshots", ".thumbnails", ".trash", ".zfs"}  # Linux
    | {".git", ".hg", ".svn", ".dvc", ".cache", ".idea", ".vscode", ".ipynb_checkpoints", "__pycache__"}
    | {"_success", "_temporary", "_delta_log"}  # Spark
)
_LITTER_PREFIXES = ("._", ".trash-", "_committed_", "_started_")  # AppleDouble, Linux, Databricks

# The suffixes in this class do not depend on the machine, because the class does not read system
# files.
_TYPES: Final = MimeTypes()
_OTHER_SUFFIXES = frozenset(
    {
        suffix.lower()
        for suffix, kind in _TYPES.types_map[True].items()
        if kind == "image/svg+xml" or not kind.startswith(("image/", "application/octet-stream"))
    }
    | {suffix.lower() for suffix in _TYPES.encodings_map}
    | {".7z", ".lz4", ".rar", ".tgz", ".zst", ".docx", ".pptx", ".xlsx"}
    | {".cfg", ".geojson", ".ini", ".ipynb", ".jsonl", ".log", ".md", ".rst", ".toml", ".yaml", ".yml"}
    | {".arrow", ".npy", ".npz", ".onnx", ".parquet", ".pkl", ".pt", ".pth", ".safetensors", ".tfrecord"}
    | {".flac", ".m4a", ".m4v", ".mkv", ".ogg", ".wmv"}
)
_DATABASES = (".db", ".sql")
"""The suffixes of databases begin so, as .db3 does."""


def is_litter(name: str) -> bool:
    """Whether systems or programs leave such files or folders behind. Case is ignored."""
    name = name.casefold()
    return name in _LITTER or name.startswith(_LITTER_PREFIXES)


def is_skipped(name: str) -> bool:
    """Whether a file or folder in a class folder is hidden, litter, or belongs to an output of
    evernear."""
    return name.startswith(".") or name in (OWN_FOLDER, MARKER) or is_litter(name)


def skipped_path(path: str) -> str:
    """``path`` up to the first component that `is_skipped`, or an empty string."""
    parts = path.split("/")
    for depth, part in enumerate(parts, 1):
        if is_skipped(part):
            return "/".join(parts[:depth])
    return ""


def names_other_kind(path: str) -> bool:
    """Whether a suffix indicates text, audio, video, an archive or data."""
    _, dot, suffix = path.rpartition(".")
    suffix = dot + suffix.lower()
    return suffix in _OTHER_SUFFIXES or suffix.startswith(_DATABASES)


def reviewed_stem(sha256: str) -> str:
    return f"review-{sha256[:16]}"


def is_reviewed(path: str) -> bool:
    if "review-" not in path:  # true for most names, and faster than a regular expression match
        return False
    return re.fullmatch(r"review-[0-9a-f]{16}\.[^.]+", path.rpartition("/")[2]) is not None


def answer_in(path: str) -> str:
    """The beginning of the hash in the name of a labeled query, or of an image whose label was
    changed in review. Empty for other files."""
    if "review-" not in path:
        return ""
    matched = re.fullmatch(r"(?:.*-)?review-([0-9a-f]{16})(?:-\d+)?(?:\.[^.]*)?", path.rpartition("/")[2])
    return matched[1] if matched else ""


def exported_stem(position: int, digest: str) -> str:
    """The position in its split, and the digest in hexadecimal form."""
    return f"{position:09}-{digest}"


def has_image_suffix(name: str) -> bool:
    """Without pathlib, which is ten times slower and would matter for millions of files."""
    return posixpath.splitext(name)[1].rstrip(".").lower() in IMAGE_SUFFIXES


def is_image_file(path: str | Path) -> bool:
    """By its suffix, so that a broken image is reported, or else by a few bytes of its content."""
    if has_image_suffix(str(path)):
        return True
    with disk_errors(path):
        descriptor = os.open(path, os.O_RDONLY)  # a file object takes four times as long
        try:
            return has_image_signature(os.read(descriptor, SIGNATURE_SIZE_BYTES))
        finally:
            os.close(descriptor)
