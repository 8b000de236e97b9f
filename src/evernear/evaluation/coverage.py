"""Neither torch nor FAISS is imported to state how many classes an accuracy covers."""

from collections.abc import Mapping


def classes_tested(metrics: Mapping[str, float]) -> str:
    """For example "8 of 10 classes tested". Empty if every class was tested, or without such
    counts."""
    classes = int(metrics.get("classes", 0))
    tested = int(metrics.get("tested_classes", classes))
    return f"{tested:,} of {classes:,} classes tested" if tested < classes else ""
