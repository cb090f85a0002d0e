"""Data sets of TensorFlow Datasets, built in a folder and without TensorFlow."""

import pytest


def built(folder, name, features, splits, supervised=None):
    """Returns the directory of a data set of these splits, {split: rows}."""
    pytest.importorskip(
        "array_record", reason="array_record has no wheel for this Python or system"
    )
    import tensorflow_datasets as tfds

    class LocalInfo(tfds.core.DatasetInfo):
        def initialize_from_bucket(self):
            """Skips the look-up, which would leave a folder behind."""

    class Builder(tfds.core.GeneratorBasedBuilder, skip_registration=True):
        VERSION = tfds.core.Version("1.0.0")

        def _info(self):
            return LocalInfo(
                builder=self,
                features=tfds.features.FeaturesDict(features),
                supervised_keys=supervised,
                disable_shuffling=True,
            )

        def _split_generators(self, dl_manager):
            return {split: enumerate(rows) for split, rows in splits.items()}

        def _generate_examples(self):
            raise NotImplementedError

    Builder.name = name
    Builder(data_dir=folder, file_format="array_record").download_and_prepare()
    return folder / name / "1.0.0"
