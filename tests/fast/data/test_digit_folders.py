"""The digits as folders, without one class."""

import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from evernear.data.sources.digits import Digits, lay_out_digits
from evernear.errors import SettingsError, StoreError


@pytest.fixture(scope="module")
def laid_out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("digits")
    lay_out_digits(directory, "7")
    return directory


def test_images_are_those_of_scikit_learn() -> None:
    from sklearn.datasets import load_digits  # takes a second

    (block,) = Digits().blocks()
    pixels, labels = load_digits(return_X_y=True)
    np.testing.assert_allclose(block.images.reshape(len(labels), 64), pixels * 255 / 16, atol=0.5)
    assert block.labels == [str(label) for label in labels]


def test_folders_have_all_digits_once(laid_out: Path) -> None:
    folders = lay_out_digits(laid_out, "7")
    (block,) = Digits().blocks()
    counts = Counter(block.labels)
    assert {path.name: len(list(path.iterdir())) for path in folders.known.iterdir()} == {
        label: count for label, count in counts.items() if label != "7"
    }
    assert len(list(folders.unseen.iterdir())) == counts["7"]
    for path in [*folders.known.glob("*/*.png"), *folders.unseen.glob("*.png")]:
        np.testing.assert_array_equal(np.asarray(Image.open(path)), block.images[int(path.stem)])
    assert {path.name for path in laid_out.iterdir()} == {"digits-without-7", "digits-7"}


def test_existing_folder_stays_as_a_person_has_changed_it(laid_out: Path, tmp_path: Path) -> None:
    shutil.copytree(laid_out, tmp_path, dirs_exist_ok=True)
    folders = lay_out_digits(tmp_path, "7")
    (folders.known / "7").mkdir()
    (folders.known / "7/review-1.png").write_bytes(b"named by a person")
    gone = next((folders.known / "3").iterdir())
    gone.unlink()
    assert lay_out_digits(tmp_path, "7") == folders
    assert (folders.known / "7/review-1.png").exists()
    assert not gone.exists()


@pytest.mark.parametrize("label", ["10", "", "seven", "../7", "07"])
def test_unknown_class_is_refused_and_nothing_is_written(tmp_path: Path, label: str) -> None:
    with pytest.raises(SettingsError, match="choose one of 0 to 9"):
        lay_out_digits(tmp_path / "new", label)
    assert not (tmp_path / "new").exists()


def test_interrupted_writing_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved: list[Path] = []
    save = Image.Image.save

    def interrupt(image: Image.Image, path: Path) -> None:
        saved.append(path)
        if len(saved) == 5:
            raise KeyboardInterrupt
        save(image, path)

    monkeypatch.setattr(Image.Image, "save", interrupt)
    with pytest.raises(KeyboardInterrupt):
        lay_out_digits(tmp_path, "7")
    assert list(tmp_path.iterdir()) == []


def test_unusable_directory_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match="file"):
        lay_out_digits(tmp_path / "file", "7")
