import gc
import math
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from data.loader import BatchLoader, entropy
from data.sources import open_source
from data.tokenizer import stdlib_tokenizer
from errors import UserError
from tests.data.streams import ByteTokenizer, ListSource, lane_stream, random_texts

ROOT = Path(__file__).parents[2]
LANES = 8


def make_loader(texts, *, seq_len=16, ranks=1, rank=0, lanes=LANES, source=None, tokenizer=None, **options):
    rows = lanes // ranks
    source, tokenizer = source or ListSource(texts), tokenizer or ByteTokenizer()
    return BatchLoader(
        source, tokenizer, seq_len=seq_len, lanes=lanes, first_lane=rank * rows, num_lanes=rows, **options
    )


def global_batches(loaders: list[BatchLoader], steps: int) -> list[torch.Tensor]:
    """(2, lanes, seq_len) of each step: inputs, labels."""
    return [torch.cat([torch.stack(next(loader)) for loader in loaders], dim=1) for _ in range(steps)]


def global_state(loaders: list[BatchLoader]) -> dict:
    states = [loader.state_dict() for loader in loaders]
    return {**states[0], "lanes": torch.cat([state["lanes"] for state in states])}


def close(*loaders: BatchLoader) -> None:
    for loader in loaders:
        loader.close()


def equal(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return len(first) == len(second) and all(map(torch.equal, first, second))


def test_batches_are_rows_of_the_lanes(rng):
    texts = random_texts(rng, 200)
    with make_loader(texts, epochs=1) as loader:
        for step in range(5):
            inputs, labels = next(loader)
            assert inputs.shape == labels.shape == (LANES, 16)
            assert inputs.dtype == labels.dtype == torch.int64
            assert inputs.is_contiguous() and labels.is_contiguous()
            for lane in range(LANES):
                stream = lane_stream(texts, ByteTokenizer(), lane, LANES)[step * 16 :]
                assert inputs[lane].tolist() == stream[:16]
                assert labels[lane].tolist() == stream[1:17]


def test_ranks_share_the_same_global_batches(rng):
    texts = random_texts(rng, 50)
    batches = {}
    for ranks in (1, 2, 4):
        loaders = [make_loader(texts, ranks=ranks, rank=rank) for rank in range(ranks)]
        batches[ranks] = global_batches(loaders, 30)
        close(*loaders)
    assert equal(batches[1], batches[2])
    assert equal(batches[1], batches[4])


def test_resume_anywhere_at_another_number_of_ranks(rng):
    texts = random_texts(rng, rng.randrange(5, 60))
    with make_loader(texts) as uninterrupted:
        expected = global_batches([uninterrupted], 60)
    step, loaders = 0, [make_loader(texts)]
    while step < 50:
        steps = rng.randrange(10)
        assert equal(global_batches(loaders, steps), expected[step : step + steps])
        step += steps
        state = global_state(loaders)
        close(*loaders)
        ranks = rng.choice([1, 2, 4, 8])
        loaders = [make_loader(texts, ranks=ranks, rank=rank) for rank in range(ranks)]
        for loader in loaders:
            loader.load_state_dict(state)
        assert torch.equal(global_state(loaders)["lanes"], state["lanes"])
    close(*loaders)


def test_resume_with_another_seq_len(rng):
    texts = random_texts(rng, 40)
    with make_loader(texts) as loader, make_loader(texts, seq_len=5) as resumed:
        global_batches([loader], 3)
        resumed.load_state_dict(loader.state_dict())
        rest = torch.cat(global_batches([loader], 5), dim=2)
        assert torch.equal(torch.cat(global_batches([resumed], 16), dim=2), rest)


def test_going_back_within_a_run(rng):
    with make_loader(random_texts(rng, 40)) as loader:
        global_batches([loader], 2)
        state = loader.state_dict()
        expected = global_batches([loader], 3)
        loader.load_state_dict(state)
        assert equal(global_batches([loader], 3), expected)


def test_state_is_of_the_batches_handed_out_and_a_copy(rng):
    texts = random_texts(rng, 300)
    with make_loader(texts, prefetch=4) as loader:
        state = loader.state_dict()
        assert state["lanes"].tolist() == [[lane, 0] for lane in range(LANES)]
        next(loader)
        while loader.batches.qsize() < 4:
            time.sleep(0.01)
        loader.state_dict()["lanes"].zero_()
        after_one = loader.state_dict()
        second = torch.stack(next(loader))
    with make_loader(texts) as resumed:
        resumed.load_state_dict(after_one)
        after_one["lanes"].zero_()
        assert torch.equal(torch.stack(next(resumed)), second)


def test_epochs_and_exhaustion(rng):
    texts = random_texts(rng, 30)
    counts = []
    for epochs in (1, 2, 3):
        with make_loader(texts, epochs=epochs) as loader:
            batches = list(loader)
            counts.append(len(batches))
            for _ in range(2):
                with pytest.raises(StopIteration):
                    next(loader)
            assert next(loader, None) is None
            assert all(inputs.shape == (LANES, 16) for inputs, _ in batches)
    assert counts[0] < counts[1] < counts[2]
    with make_loader(texts, epochs=1, seq_len=10_000) as loader:
        assert list(loader) == []
    with make_loader(texts) as loader:  # For ever
        assert len(global_batches([loader], 10 * counts[2])) == 10 * counts[2]


def test_exceptions_of_the_thread_surface(rng):
    class Failing(ListSource):
        def documents(self, start, epoch=0):
            yield from list(super().documents(start, epoch))
            raise UserError("line 7 is bad")

    texts = random_texts(rng, 100)
    monkey = pytest.MonkeyPatch()
    with monkey.context() as patch, make_loader([], source=Failing(texts)) as loader:
        patch.setattr("data.packing.CHUNK", 1)  # So that there are batches before it fails
        next(loader)
        for _ in range(2):
            with pytest.raises(UserError, match="line 7 is bad"):
                while True:
                    next(loader)
    with make_loader([]) as loader, pytest.raises(UserError, match="no document"):
        next(loader)


def test_states_that_do_not_fit(rng):
    texts = random_texts(rng, 20)
    with make_loader(texts) as loader, make_loader(texts, lanes=4) as fewer, make_loader(texts[1:]) as other:
        state = loader.state_dict()
        with pytest.raises(UserError, match=r"training\.global_batch_size: the checkpoint's is 8 and this run's 4"):
            fewer.load_state_dict(state)
        with pytest.raises(UserError, match=r"20 texts(.|\n)*19 texts(.|\n)*training\.dataset_path and debug\.seed"):
            other.load_state_dict(state)
        with pytest.raises(UserError, match=r"model\.tokenizer_path.*then: words; now: bytes"):
            loader.load_state_dict({**state, "tokenizer": "words"})
        next(loader)  # It goes on after a refusal.


def data_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "data"]


def test_threads_end(rng):
    texts = random_texts(rng, 20)
    before = len(data_threads())
    loader = make_loader(texts)
    assert len(data_threads()) == before  # None before the first batch
    next(loader)
    assert len(data_threads()) == before + 1
    loader.close()
    loader.close()
    assert len(data_threads()) == before
    with pytest.raises(ValueError, match="closed"):
        next(loader)
    dropped = make_loader(texts)
    next(dropped)
    del dropped
    gc.collect()
    assert len(data_threads()) == before


def test_no_hang_at_exit(tmp_path):
    """Where a loader is left open, the process still ends, and with its own status."""
    program = (
        "import sys; from pathlib import Path; from data.loader import BatchLoader;"
        "from data.sources import open_source; from data.tokenizer import stdlib_tokenizer;"
        "tokenizer = stdlib_tokenizer(300, Path(sys.argv[1]));"
        "loader = BatchLoader(open_source('stdlib', None, 0), tokenizer, seq_len=2048, lanes=4, first_lane=0,"
        "num_lanes=4, prefetch=50); "
        "next(loader); raise SystemExit(7)"
    )
    run = subprocess.run([sys.executable, "-c", program, tmp_path], cwd=ROOT, timeout=60, capture_output=True)
    assert (run.returncode, run.stderr) == (7, b"")


def test_entropy(rng):
    assert entropy(torch.tensor([5, 5, 0, 0])) == pytest.approx(math.log(2))
    assert entropy(torch.tensor([0, 9])) == 0
    assert math.isnan(entropy(torch.zeros(3, dtype=torch.int64)))
    texts = random_texts(rng, 100)
    loaders = [make_loader(texts, ranks=2, rank=rank) for rank in range(2)]
    assert math.isnan(loaders[0].unigram_entropy())
    labels = torch.cat([batch[1].flatten() for batch in global_batches(loaders, 7)])
    counts = loaders[0].label_counts + loaders[1].label_counts
    assert counts.dtype == torch.int64
    assert torch.equal(counts, torch.bincount(labels, minlength=258))
    p = counts[counts > 0] / counts.sum()
    assert entropy(counts) == pytest.approx(-float((p * p.log()).sum()), rel=1e-5)
    assert loaders[0].unigram_entropy() == entropy(loaders[0].label_counts)
    close(*loaders)


def test_stdlib_from_text_to_batches(tmp_path):
    """The real parts together: what comes out of the lanes is the text of the documents."""
    tokenizer, source = stdlib_tokenizer(300, tmp_path), open_source("stdlib_validation", None, 5)
    texts = [text for _, text in source.documents(0)]
    with BatchLoader(source, tokenizer, seq_len=64, lanes=2, first_lane=1, num_lanes=1, epochs=1) as loader:
        batches = list(loader)
        stream = torch.cat([batches[0][0][0, :1], *(labels[0] for _, labels in batches)]).tolist()
        expected = "".join(f"<|begin_of_text|>{text}<|end_of_text|>" for text in texts[1::2])
        assert len(stream) == len(batches) * 64 + 1
        assert expected.startswith(tokenizer.decode(stream).rstrip("\ufffd"))
        assert len(tokenizer.decode(stream)) > len(expected) - 400
