"""The images of a dataset that come from review.

In a review, people label queries for which the recognizer was uncertain. This selection biases a
measurement. After five rounds of review, the accuracy of a release was 81.1% on test images that
include images from review, 87.0% on the other test images, and 87.5% on fresh images. Images from
review are therefore only in the train and gallery splits. If an image in the test or query split
has only files from review left, it is moved to the train split. No earlier release was trained on
it.

The name of a file shows whether the image comes from review
(`evernear.data.sources.names.is_reviewed`). The tables of a snapshot remember that the image comes
from review, so that the image is not used for measurements even if the file is renamed. If the
source also contains the image under an ordinary name, the image counts as an ordinary image.
"""

from evernear.data.manifest import Split

TRAINING: tuple[Split, ...] = ("train", "gallery")
"""The splits for images from review. `evernear.evaluation` measures with the others."""
