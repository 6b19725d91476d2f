"""Methods and their online score on two real processes, against one process with the whole batch."""

import itertools

import pytest
import torch

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def results(on_processes):
    return on_processes("methods_program.py", 2)


def data(shape, seed):
    """The program's data, drawn again."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_contrast_is_over_the_images_of_all_processes(results):
    weight = data((6, 5), 0).double().requires_grad_()
    views = [data((8, 6), seed).double() @ weight for seed in (1, 2, 4)]
    z = torch.stack([x / x.norm(dim=1, keepdim=True) for x in views])
    terms = []
    for v, u, i in itertools.product(range(3), range(3), range(8)):
        if v != u:
            away = [z[v, i] @ z[w, j] / 0.5 for w in range(3) for j in range(8) if j != i]
            near = z[v, i] @ z[u, i] / 0.5
            terms.append(torch.stack([near, *away]).logsumexp(0) - near)
    loss = torch.stack(terms).mean()
    loss.backward()
    assert results[0]["contrast"]["own_loss"] != results[1]["contrast"]["own_loss"]
    for result in results:
        torch.testing.assert_close(result["contrast"]["loss"].double(), loss.detach(), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(result["contrast"]["gradient"].double(), weight.grad, rtol=1e-4, atol=1e-6)


def test_repulsion_is_from_the_images_of_all_processes(results):
    weight = data((6, 5), 0).double().requires_grad_()
    own = [data((8, 6), seed).double() @ weight for seed in (1, 2, 4)]
    z, *own = (x / x.norm(dim=1, keepdim=True) for x in (data((8, 5), 3).double(), *own))
    terms = []
    for i in range(8):
        near = [own[0][i] @ z[j] / 0.5 for j in range(8)]
        away = [own[0][i] @ x[j].detach() / 0.5 for x in own for j in range(8) if j != i]
        terms.append(torch.stack([*near, *away]).logsumexp(0) - near[i])
    loss = torch.stack(terms).mean()
    loss.backward()
    assert results[0]["repulsion"]["own_loss"] != results[1]["repulsion"]["own_loss"]
    for result in results:
        torch.testing.assert_close(result["repulsion"]["loss"].double(), loss.detach(), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(
            result["repulsion"]["gradient"].double(), weight.grad, rtol=1e-4, atol=1e-6
        )


def test_the_queue_takes_the_keys_in_the_order_of_the_global_batch(results):
    """3 steps of 8 keys go round a queue of 10 twice; the processes had 2 micro-batches of 2 each."""
    first, second = (r["queue"] for r in results)
    expected = first["start"].clone()
    for i, key in enumerate(first["keys"]):
        expected[i % 10] = key
    assert torch.equal(first["start"], second["start"])
    assert torch.equal(first["queue"], second["queue"])
    torch.testing.assert_close(first["queue"], expected)
    assert first["pointer"] == second["pointer"] == 24 % 10
    assert torch.cdist(expected, expected).fill_diagonal_(1).min() > 1e-3  # no two keys are alike


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_the_center_is_of_the_outputs_of_all_processes_and_micro_batches(results, micro_batches):
    first, second = (r["centers"][micro_batches] for r in results)
    expected = torch.zeros(12, dtype=torch.float64)
    for rows in first["outputs"].double():  # 3 steps of 2 views of 8 images
        assert len(rows) == 16
        expected = 0.9 * expected + 0.1 * rows.mean(0)
    assert torch.equal(first["center"], second["center"])
    torch.testing.assert_close(first["center"].double(), expected, rtol=1e-5, atol=1e-7)
    # One process's images alone would give another center.
    own = first["outputs"].double()[:, [0, 1, 2, 3, 8, 9, 10, 11]].mean(1)
    assert (own - first["outputs"].double().mean(1)).abs().max() > 1e-4


def test_two_processes_train_dino_as_one_with_two_devices(results):
    """Weights, center, and on process 0 its own device's statistics; the last layer waits for a step on both."""
    for rank, result in enumerate(results):
        ours, alone = result["dino"], result["dino alone"]
        assert ours.keys() == alone.keys()
        for name, tensor in alone.items():
            if rank == 0 or "running" not in name:
                torch.testing.assert_close(ours[name], tensor, rtol=1e-7, atol=1e-9, msg=name)
        turned = ours["turned"]
        assert turned[0] < 1e-12
        assert (turned[1:] > 1e-6).all()
        assert ours["center"].any()


def test_online_knn_scores_the_encoder_of_the_first_process(results):
    alone = [r["knn alone"]["value"] for r in results]
    assert alone[0] != alone[1]  # the statistics matter
    assert [r["knn"]["value"] for r in results] == [alone[0], alone[0]]
    assert all(r["knn"]["kept"] for r in results)
