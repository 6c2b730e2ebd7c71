"""The training step, from top to bottom. Everything it needs has been opened by :mod:`pipeline.job`.

Each span names a part of the step's time; what no span covers shows up in the report as unattributed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from profiler.events import Flag, Stage

if TYPE_CHECKING:
    from pipeline.job import Job


def train(job: Job) -> None:
    """Do steps until the job has done its iterations or was asked to stop."""
    record, device = job.recorder, job.device
    while not job.done():
        step = job.step
        with record.span(Stage.STEP, step=step, flags=Flag.FIRST if step == job.first_step else 0) as whole:
            if job.test_is_due():
                with record.span(Stage.TEST, step=step):
                    job.test()

            batch = next(job.batches)  # the feed records how long this waits
            whole.epoch, whole.items = batch.epoch, len(batch)

            with record.span(Stage.HOST, step=step):
                arrays = batch.on_device()  # the device records how long the copy keeps us waiting: Stage.H2D
                job.batches.copy_ahead()  # the next batch travels while this one is computed with
                with record.span(Stage.HOST, step=step, flags=Flag.PROFILER):
                    job.fingerprint_inputs(batch, arrays)

            with record.span(Stage.COMPUTE, step=step), device.compute(step=step, epoch=batch.epoch):
                loss = job.learn(batch, arrays)

            with record.span(Stage.HOST, step=step, flags=Flag.PROFILER):
                job.fingerprint_outcome(loss)
                job.note_memory()
            with record.span(Stage.HOST, step=step):
                job.show(whole.items, loss)
            job.step = step + 1
            if job.snapshot_is_due():
                with record.span(Stage.CHECKPOINT, step=step):
                    job.snapshot()
