"""The one loop. Pretraining, linear and semi-supervised evaluation and detection all run through `fit`."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

from momentum2 import distributed
from momentum2.distributed.together import broadcast_bytes
from momentum2.machine import cpu_threads
from momentum2.optim import build_optimizer, set_lr
from momentum2.runs.checkpoint import collect, restore
from momentum2.runs.directory import OpenRun
from momentum2.seeds import derive
from momentum2.training.alarms import Alarms
from momentum2.training.device import memory_gb, use_bf16
from momentum2.training.job import Job
from momentum2.training.log import Log, Meter, spread
from momentum2.training.signals import StopSignal


def fit(job: Job, run: OpenRun) -> bool:
    """Train to the end, from the run's newest checkpoint if it has one; False if a signal stopped it before."""
    method, t, device, world = job.method, job.train, job.device, distributed.world_size()
    optimizer = build_optimizer(method.named_parameters(), job.optim, job.lr_peak, method.constant_lr)
    run.check_space(method)
    saved = run.checkpoints.load()
    start = saved.step if saved else 0
    if saved:
        restore(method, optimizer, saved)
    # The number of threads decides the order of sums on a CPU, so a resumed run keeps it.
    threads = t.threads or int(saved.info["threads"] if saved else broadcast_bytes(b"%d" % cpu_threads()))
    torch.set_num_threads(threads)
    parameters = [p for p in method.parameters() if p.requires_grad]
    model: nn.Module = method.train()
    all_but_last: Callable[[], AbstractContextManager[None]] = nullcontext  # of the micro-batches
    if world > 1:  # buffers stay with their process: whose statistics count is the method's business
        model = distributed.data_parallel(method)
        all_but_last = model.no_sync
    if t.compile:
        model = torch.compile(model)  # type: ignore[assignment]
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=use_bf16(t.precision, device))
    log = Log(run.directory, start, job.steps, job.steps_per_epoch, job.monitor.tensorboard)
    alarms, meter, stop = Alarms(job.monitor), Meter(), False
    with log, StopSignal() as signal, job.batches(start) as batches:
        if saved:
            log.say("Finished already." if start == job.steps else f"Going on after step {start:,}.")
        # A run that was stopped or killed before the validation of its last step has it now.
        if job.validate and job.is_due(start) and broadcast_bytes(b"%d" % log.has_validation(start)) == b"0":
            log.metrics(start, job.validate())
        meter.restart()
        for batch in batches:
            k = batch.step
            torch.manual_seed(derive(t.seed, k, distributed.rank()))  # of dropout and its like
            lr = job.lr(k)
            set_lr(optimizer, lr)
            method.before_step(k)
            loss = torch.zeros((), device=device)
            for i in range(t.accumulate):
                inputs = batch.inputs(i, t.accumulate)
                with all_but_last() if i < t.accumulate - 1 else nullcontext():
                    with autocast:
                        output = model(*inputs)
                    (output.loss / t.accumulate).backward()
                loss += output.loss.detach() / t.accumulate
            norm = clip_grad_norm_(parameters, job.optim.clip_norm or float("inf"))
            stop = signal.check(loss + norm, k, run.checkpoints)  # the same answer on all processes
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            done = k + 1
            look = done % job.monitor.log_every == 0 or done == job.steps
            watched = {"loss": loss, "grad_norm": norm, **output.metrics, **method.watch(k)} if look else {}
            method.after_step(k)
            meter.count(t.batch_size, batch.wait)
            if look:
                distributed.all_reduce_mean_([loss])
                values = {name: float(value) for name, value in watched.items()}
                values |= {"lr": lr, **meter.read(), "memory_gb": memory_gb(device)}
                if output.z is not None:
                    values |= spread(output.z)
                log.metrics(done, values)
                for sentence in alarms.check(done, values):
                    log.alarm(done, sentence)
            if done == job.steps or done % t.checkpoint_every == 0 or stop:
                run.checkpoints.save(done, *collect(method, optimizer), {"threads": threads, **job.decided})
                meter.restart()  # this time is not the steps'
            if stop:
                break
            if job.validate and job.is_due(done):  # after the save: it may take minutes
                log.metrics(done, job.validate())
                meter.restart()
    return not stop
