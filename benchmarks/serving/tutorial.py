"""Decoding and search as tutorials write them: all pixels are decoded, and the search is exact.

TorchServe loads this file from the archive of the naive handler, FastAPI and LitServe from this
folder.
"""

import io
import json
from collections import Counter
from pathlib import Path

import faiss
import numpy as np
import torch
from PIL import Image
from torchvision import transforms

K = 5
METADATA_FILE = "naive.json"


class Tutorial:
    def __init__(self, directory: Path) -> None:
        self.index = faiss.read_index(str(directory / "index.faiss"))
        self.label_indices = np.load(directory / "labels.npy")
        metadata = json.loads((directory / METADATA_FILE).read_text())
        self.names = metadata["labels"]
        self.transform = transforms.Compose(
            [
                transforms.Grayscale() if metadata["channels"] == 1 else transforms.Lambda(_to_rgb),
                transforms.Resize(min(metadata["size"])),
                transforms.CenterCrop(metadata["size"]),
                transforms.ToTensor(),
                transforms.Normalize(0, 1 / 255),  # the network normalizes and expects pixels in 0..255
            ]
        )

    def decode(self, image: bytes) -> torch.Tensor:
        return self.transform(Image.open(io.BytesIO(image)))

    def search(self, embeddings: torch.Tensor) -> list[dict[str, object]]:
        squared, rows = self.index.search(embeddings.cpu().numpy(), K)
        answers = []
        for distances, neighbors in zip(squared, rows, strict=True):
            labels = [self.names[self.label_indices[row]] for row in neighbors]
            answers.append({"pred": Counter(labels).most_common(1)[0][0], "dist": float(distances[0]) ** 0.5})
        return answers


def _to_rgb(image: Image.Image) -> Image.Image:
    return image.convert("RGB")
