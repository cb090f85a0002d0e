"""Pipelines of Apache Beam on a named runner, with errors of one line."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

_disabled_level = logging.root.manager.disable
logging.disable(logging.WARNING)  # Beam warns of missing cloud clients
try:
    import apache_beam as beam
    from apache_beam.options.pipeline_options import PipelineOptions
finally:
    logging.disable(_disabled_level)

from experiments.beam.draws import BatchWork  # noqa: E402
from experiments.beam.prepare import StoreWork  # noqa: E402

LOCAL = "DirectRunner"
"""Name of this machine's runner."""


class PipelineError(ValueError):
    """Failure of a pipeline, in one line."""


@dataclass(frozen=True)
class Runner:
    """Runner of pipelines.

    Attributes:
        name: Beam's name of the runner.
        options: Options of the pipeline, "name=value" each, or "name" alone for a flag.
    """

    name: str = LOCAL
    options: tuple[str, ...] = ()

    def write_store(self, work: StoreWork) -> None:
        """Writes the pieces of a store."""

        def build(pipeline: beam.Pipeline) -> None:
            _ = _reshuffled(pipeline, "ranges", work.ranges) | "parse" >> beam.Map(work.parse)

        self._run(build)

    def write_batches(self, work: BatchWork) -> None:
        """Writes the files of batches."""

        def build(pipeline: beam.Pipeline) -> None:
            files = range(work.draw.num_files)  # also files without rows
            numbers = pipeline | "files" >> beam.Create([(file, None) for file in files])
            drawn_parts = _reshuffled(pipeline, "chunks", work.tasks()) | beam.FlatMapTuple(
                work.part
            )
            _ = (
                (numbers, drawn_parts)
                | "together" >> beam.Flatten()
                | "by file" >> beam.GroupByKey()
                | "write"
                >> beam.MapTuple(lambda file, parts: work.write(file, filter(None, parts)))
            )

        self._run(build)

    def _run(self, build: Callable[[beam.Pipeline], None]) -> None:
        """Runs a pipeline to its end.

        Args:
            build: Function that adds the steps to a pipeline.

        Raises:
            ValueError: If Beam has no such runner or option.
            PipelineError: If the pipeline failed.
        """
        with _quiet(self.name == LOCAL):
            pipeline = beam.Pipeline(options=self._options())
            build(pipeline)
            try:
                state = pipeline.run().wait_until_finish()
            except Exception as error:
                raise PipelineError(
                    f"the pipeline on {self.name} failed: {_reason(error)}"
                ) from error
        if str(state) != "DONE":
            raise PipelineError(f"the pipeline on {self.name} ended as {state}")

    def _options(self) -> PipelineOptions:
        for option in self.options:
            if not re.match(r"[a-z]\w*(=|$)", option):
                raise ValueError(f"--beam-options {option!a:.60}: expected NAME=VALUE or NAME")
        flags = [f"--runner={self.name}", *(f"--{option}" for option in self.options)]
        if self.name == LOCAL:
            flags.insert(0, "--default_sdk_harness_log_level=ERROR")
        options = PipelineOptions(flags)
        names = {name for name in options.get_all_options(retain_unknown_options=False)}
        unknown = [o for o in self.options if o.partition("=")[0] not in names]
        if unknown:
            raise ValueError(f"--beam-options: Beam has no option {', '.join(unknown)}")
        return options


def _reason(error: Exception) -> str:
    """Returns the first line of a worker's error, which runners bury in tracebacks."""
    lines = [line.strip() for line in str(error).splitlines()]
    raised = [line for line in lines if re.match(r"([\w.]+\.)?\w*(Error|Exception)\b.*:", line)]
    return (raised[-1:] or [line for line in lines if line] or [type(error).__name__])[0][:400]


@contextmanager
def _quiet(local: bool) -> Iterator[None]:
    """Silences Beam's warnings while a pipeline runs on this machine."""
    logger = logging.getLogger()
    level = logger.level
    if local:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


def _reshuffled(pipeline: beam.Pipeline, name: str, items: Sequence) -> beam.PCollection:
    """Returns `items` as a collection whose elements any workers may take."""
    return pipeline | name >> beam.Create(items) | f"reshuffle {name}" >> beam.Reshuffle()
