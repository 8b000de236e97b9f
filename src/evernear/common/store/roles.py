"""What each kind of key may do in the store: the table from which the policies are made.

`tests/repository/deploy/test_object_store.py` compares docs/object-store.md and the files of
``deploy/overlays/local/seaweedfs`` with `Role.statements`, and
`tests/real/common/store/test_permissions.py` makes the calls and
`tests/slow/common/store/test_roles.py` runs the commands with exactly these policies.
"""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Role:
    """Prefixes of keys. An empty one is the whole store."""

    name: str
    commands: tuple[str, ...]
    reads: tuple[str, ...] = ()
    """A role that reads also lists."""
    writes: tuple[str, ...] = ()
    deletes: tuple[str, ...] = ()
    uploads_files: bool = False
    """In parts, which an error aborts."""

    def statements(self, bucket: str, prefix: str = "") -> list[dict[str, Any]]:
        """The statements of the policy for a store at ``s3://bucket/prefix``."""
        arn = f"arn:aws:s3:::{bucket}"
        writing = ["s3:PutObject", "s3:AbortMultipartUpload"] if self.uploads_files else ["s3:PutObject"]
        allowed: list[tuple[tuple[str, ...], tuple[str, ...]]] = [(("s3:ListBucket",), (arn,))] if self.reads else []
        if self.reads == self.writes:
            allowed.append((("s3:GetObject", *writing), self.reads))
        else:
            allowed += [(("s3:GetObject",), self.reads), (tuple(writing), self.writes)]
        allowed.append((("s3:DeleteObject",), self.deletes))
        return [
            {
                "Effect": "Allow",
                "Action": _one_or_list(actions),
                "Resource": _one_or_list(
                    [name if name == arn else "/".join(filter(None, [arn, prefix, f"{name}*"])) for name in names]
                ),
            }
            for actions, names in allowed
            if names
        ]


def _one_or_list(items: Any) -> Any:
    return items[0] if len(items) == 1 else list(items)


IMAGES = Role("reader of the source images", ("pipeline steps", "evernear watch"), reads=("",))
"""Of the bucket with the images."""
PIPELINE = Role(
    "writer of the store",
    ("pipeline steps", "evernear run", "evernear slack", "evernear console"),
    reads=("",),
    writes=("",),
    # Its own test objects, the lock of a started run, and images that a user has named.
    deletes=(".swap/", "runs/starting/", "review/pending/"),
    uploads_files=True,
)
READER = Role("model server", ("evernear serve --follow", "evernear pod fetch", "evernear prep"), reads=("releases/",))
QUERIES = Role("sidecar of a serving pod", ("evernear watch --ship",), writes=("queries/",))
WATCH = Role(
    "watcher",
    ("evernear watch",),
    reads=("",),
    # Proposals and the state of a bake, the lock of a run that it starts, and its own test objects.
    writes=("triggers/", "runs/starting/", ".swap/"),
    deletes=("queries/", "runs/starting/", ".swap/"),
)
POLICIES = {"images": IMAGES, "pipeline": PIPELINE, "reader": READER, "queries": QUERIES, "watch": WATCH}
"""By the name of the file in ``deploy/overlays/local/seaweedfs``."""
