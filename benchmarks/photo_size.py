"""The size at which photographs are stored for a pretrained network, which sees a center crop of
7/8 of the shorter side at 224 px.

``python benchmarks/photo_size.py DIRECTORY`` with a checkout of the GitHub repository
marcusklasson/GroceryStoreDataset. Each photograph is resized as ingest does, then cropped and
resized as the network does. A test image, taken in another shop, gets the label of the nearest of
all training images, or of the nearest vector of a release with a frozen backbone. Compared with the
first size, images that only one of both names right are counted, with the p-value of McNemar's
exact test.
"""

import argparse
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from scipy.stats import binomtest

from benchmarks import machine
from benchmarks.unknown import CROP, INPUT_PX, RULES, Known, commit, groceries, whitening
from evernear.settings.train import WEIGHTS_OF_PHOTOGRAPHS

SIZES_PX = (224, 256, 288)
MEASURED = ("nearest image", "as in a release")


class Labeled(NamedTuple):
    features: NDArray[np.float64]
    labels: NDArray[np.str_]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    directory = parser.parse_args().directory
    machine_info = machine.describe()
    with ProcessPoolExecutor(2) as pool:
        outcomes = list(pool.map(named_right, [directory] * len(SIZES_PX), SIZES_PX))
    rows = [["shorter side", "rule", "label right, of test images", "gained, lost, p"]]
    results: list[dict[str, Any]] = []
    for size_px, outcome in zip(SIZES_PX, outcomes, strict=True):
        for rule, right in outcome.items():
            first = outcomes[0][rule]
            gained, lost = int((right & ~first).sum()), int((first & ~right).sum())
            p = float(binomtest(gained, gained + lost).pvalue) if gained + lost else 1.0
            results.append(
                {"size_px": size_px, "rule": rule, "right": int(right.sum()), "gained": gained, "lost": lost, "p": p}
            )
            change = f"{gained}, {lost}, {p:.4f}" if size_px != SIZES_PX[0] else "-"
            rows.append([f"{size_px} px", rule, f"{right.mean():.1%} of {len(right):,}", change])
    machine.write(
        "photo_size",
        "The size at which photographs are stored",
        machine_info,
        {"source": commit(directory), "rows": results},
        rows,
    )


def named_right(directory: Path, size_px: int) -> dict[str, NDArray[np.bool_]]:
    """For each rule, whether each test image is named right."""
    split = groceries(directory)
    train, test = features(split.train, size_px), features(split.test, size_px)
    names, classes = np.unique(train.labels, return_inverse=True)
    known = Known(train.features, classes, len(names))
    embed = whitening(known)
    gallery, queries = known._replace(vectors=embed(known.vectors)), embed(test.features)
    return {rule: names[RULES[rule](gallery, queries).argmin(axis=1)] == test.labels for rule in MEASURED}


def features(photographs: dict[str, list[Any]], size_px: int) -> Labeled:
    import timm
    import torch

    from evernear.embedding.backbone import read_weights

    torch.set_num_threads(1)
    state = read_weights(WEIGHTS_OF_PHOTOGRAPHS, "tf_efficientnet_lite0", None).state
    network = timm.create_model("tf_efficientnet_lite0", num_classes=0).eval()
    network.load_state_dict({key: value for key, value in state.items() if not key.startswith("classifier.")})
    crop_px = round(size_px * CROP)
    edge = (size_px - crop_px) / 2
    rows: list[Any] = []
    with torch.inference_mode():
        for file in (file for files in photographs.values() for file in files):
            image = Image.open(file).convert("RGB")
            side = min(image.size)
            left, top = ((length - side) / 2 for length in image.size)
            stored = image.resize((size_px, size_px), Image.Resampling.BILINEAR, (left, top, left + side, top + side))
            box = (edge, edge, edge + crop_px, edge + crop_px)
            seen = np.array(stored.resize((INPUT_PX, INPUT_PX), Image.Resampling.BICUBIC, box))
            tensor = torch.from_numpy(seen).permute(2, 0, 1)[None].float() / 127.5 - 1
            rows.append(network(tensor.to(memory_format=torch.channels_last)).double().numpy()[0])
    labels = [label for label, files in photographs.items() for _ in files]
    return Labeled(np.stack(rows), np.array(labels))


if __name__ == "__main__":
    main()
