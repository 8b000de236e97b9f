"""The tests of an index, with Milvus."""

from tests.fast.index.conftest import index_settings
from tests.fast.index.test_build import (
    test_index_build_is_deterministic,
    test_index_description_records_its_inputs,
    test_nan_embeddings_are_rejected,
)
from tests.fast.index.test_calibrate import (
    test_excluded_classes_are_neither_indexed_nor_used_for_calibration,
    test_known_images_take_precedence_over_impostors,
    test_missing_queries_or_impostors_are_reported,
    test_probe_threshold_is_used_and_its_error_rates_are_measured,
)
from tests.fast.index.test_search import (
    any_index_dir,
    test_index_of_another_network_is_rejected,
    test_number_of_listed_neighbors_does_not_affect_the_label,
    test_prediction_does_not_depend_on_the_batch,
    test_recognize_matches_a_reference_implementation,
    test_vectors_of_wrong_dimension_are_rejected,
)

BACKEND = "milvus"
__all__ = [
    "any_index_dir",
    "index_settings",
    "test_excluded_classes_are_neither_indexed_nor_used_for_calibration",
    "test_index_build_is_deterministic",
    "test_index_description_records_its_inputs",
    "test_index_of_another_network_is_rejected",
    "test_known_images_take_precedence_over_impostors",
    "test_missing_queries_or_impostors_are_reported",
    "test_nan_embeddings_are_rejected",
    "test_number_of_listed_neighbors_does_not_affect_the_label",
    "test_prediction_does_not_depend_on_the_batch",
    "test_probe_threshold_is_used_and_its_error_rates_are_measured",
    "test_recognize_matches_a_reference_implementation",
    "test_vectors_of_wrong_dimension_are_rejected",
]
