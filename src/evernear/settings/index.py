from pydantic import Field, field_validator

from evernear.common import plugins
from evernear.settings.section import Section, absolute


class IndexSettings(Section):
    """The gallery index, and the rates that set the threshold."""

    backend: str = Field(
        default=plugins.FAISS,
        description="faiss: vectors in the archive. milvus: vectors in a collection, for more than one machine.",
    )
    uri: str = Field(
        default="",
        pattern=r"^(https?://[^@\s]+|/.+\.db|[^:]+\.db)?$",
        description="Milvus: http://HOST:19530, https://..., or a path that ends with .db for Milvus Lite. The token "
        "is in EVERNEAR_MILVUS_TOKEN or EVERNEAR_MILVUS_TOKEN_FILE.",
    )
    collection: str = Field(
        default="evernear",
        pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,99}$",
        description="Milvus: alias of the champion's collection, and prefix of all names; use one per store.",
    )
    type: str | None = Field(
        default=None,
        min_length=1,
        description="A faiss.index_factory string (Flat, HNSW32, IVF256,Flat ...), or an index type of Milvus (FLAT, "
        "HNSW,M=32,efConstruction=360 ...). Default: chosen by size and recall, Flat up to 8 MiB of vectors.",
    )
    search: str = Field(
        default="",
        description="Search parameters of index.type: efSearch=64, nprobe=16 ..., or ef=64 ... of Milvus. Default: "
        "the library's.",
    )
    k: int = Field(
        default=5,
        ge=1,
        le=1000,
        description="Number of neighbors in an answer. The nearest one gives the label.",
    )
    false_accept_rate: float = Field(
        default=0.05,
        gt=0.0,
        lt=1.0,
        description="Share of images of unseen classes to accept. A lower value also rejects more known images.",
    )
    false_reject_rate: float = Field(
        default=0.05,
        gt=0.0,
        lt=1.0,
        description="Largest share of known images to call unknown. It takes precedence over false_accept_rate.",
    )
    nodes: int = Field(
        default=1,
        ge=1,
        description="Nodes that embed the images, as an [Indexed Job](many-machines.md) if more than 1.",
    )

    @field_validator("backend")
    @classmethod
    def _known(cls, backend: str) -> str:
        if backend not in plugins.backend_names():
            raise ValueError(f"should be one of {', '.join(plugins.backend_names())}")
        return backend

    @field_validator("uri")
    @classmethod
    def _absolute(cls, uri: str) -> str:
        """Make a path absolute, because a run's steps have a different working directory."""
        return uri if not uri or "://" in uri else str(absolute(uri))

    @property
    def temporary(self) -> "IndexSettings":
        """For a FAISS index that only one process uses."""
        if self.backend == plugins.FAISS:
            return self
        return self.model_copy(update={"backend": plugins.FAISS, "type": None, "search": ""})
