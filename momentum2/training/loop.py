"""The one loop. Pretraining, linear and semi-supervised evaluation and detection all run through `fit`."""

from functools import partial

import torch

from momentum2 import distributed
from momentum2.distributed.together import broadcast_bytes
from momentum2.methods.method import place_of_student
from momentum2.optim import STATES, build_optimizer, set_weight_decay
from momentum2.runs.directory import OpenRun
from momentum2.runs.state import collect, restore
from momentum2.schedules import cosine_between
from momentum2.training.alarms import Alarms
from momentum2.training.by_view import choose_threads
from momentum2.training.device import memory_gb
from momentum2.training.job import Job
from momentum2.training.log import Log, Meter, on_host, spread
from momentum2.training.signals import StopSignal
from momentum2.training.step import Stepper


def fit(job: Job, run: OpenRun) -> bool:
    """Train to the end, from the run's newest checkpoint if it has one; False if a signal stopped it before."""
    method, t, device = job.method, job.train, job.device
    encoder = place_of_student(method)
    optimizer = build_optimizer(
        method.named_parameters(), job.optim, job.lr_peak, method.constant_lr, encoder
    )
    run.check_space(method, STATES[job.optim.name])
    saved = run.checkpoints.load()
    start = saved.step if saved else 0
    if saved:
        restore(method, optimizer, saved)
    run.begin()  # nothing was refused
    threads = choose_threads(method, t, device, saved.info if saved else None)
    frozen = round(job.optim.freeze_encoder_epochs * job.steps_per_epoch)
    take_step = Stepper(method.train(), optimizer, t, job.optim, device, threads, frozen)
    if saved:
        take_step.load(saved.shared, saved.step)
    log = Log(run.directory, start, job.steps, job.steps_per_epoch, job.monitor)
    alarms, meter, stop = Alarms(job.monitor), Meter(), False
    last_step = torch.cuda.Event() if device.type == "cuda" else None
    with log, StopSignal(run.checkpoints, device) as signal, job.batches(start) as batches:
        if saved:
            log.say("This run is already finished." if start == job.steps else f"Resuming at step {start:,}.")
        # A run that was stopped or killed before the validation of its last step has it now.
        if job.validate and job.is_due(start) and broadcast_bytes(b"%d" % log.has_validation(start)) == b"0":
            log.metrics(start, job.validate(start))
        meter.restart()
        for batch in batches:
            k, lr, done = batch.step, job.lr(batch.step), batch.step + 1
            look = done % job.monitor.log_every == 0 or done == job.steps
            if job.optim.weight_decay_end is not None:
                decay = job.optim.weight_decay, job.optim.weight_decay_end
                set_weight_decay(optimizer, cosine_between(*decay, k, job.steps))
            # A busy device lost no time.
            waited = batch.wait if last_step is None or last_step.query() else 0.0
            # It says on all processes alike whether to stop.
            check = partial(signal.check, step=k)
            taken = take_step(k, lr, partial(batch.inputs, n=t.accumulate), check, watch=look)
            if last_step is not None:
                last_step.record()
            stop = taken.stop
            meter.count(t.batch_size, waited)
            if look:
                distributed.all_reduce_mean_([taken.loss])
                watched = {"loss": taken.loss, "grad_norm": taken.norm, **taken.output.metrics}
                values, z = on_host({**watched, **taken.watched}, taken.output.z)
                stop = signal.settle(k)
                values |= {"lr": lr, **meter.read(), "memory_gb": memory_gb(device)}
                if z is not None:
                    values |= spread(z)
                log.metrics(done, values)
                for sentence in alarms.check(done, values):
                    log.alarm(done, sentence)
            if done == job.steps or done % t.checkpoint_every == 0 or stop:
                stop = signal.settle(k)  # nothing that is not finite is saved
                decided = {**take_step.threads.decide(), **job.decided}
                shared, devices = collect(method, optimizer)
                run.checkpoints.begin(done, shared | take_step.state(), devices, decided)
                meter.restart()  # this time is not the steps'
            if stop:
                break
            if job.validate and job.is_due(done):  # after the save: it may take minutes
                run.checkpoints.finish()
                found = job.validate(done)
                log.metrics(done, found)
                for sentence in alarms.check_start(done, found):
                    log.alarm(done, sentence)
                meter.restart()
        run.checkpoints.finish()
    return not stop
