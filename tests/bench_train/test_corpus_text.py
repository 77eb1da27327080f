"""The text: split and batches are functions of their arguments, and bad inputs are named."""

import os
from pathlib import Path

import pytest
import torch

from lamina.bench.training import corpus as corpus_module
from lamina.bench.training.corpus import Batch, Corpus, CorpusError


def write_text(path: Path, nbytes: int) -> Path:
    """Every four bytes are a number of their own, so that windows can be found again."""
    path.write_bytes("".join(f"{number:03x}\n" for number in range(nbytes // 4)).encode())
    return path


def rows_of(batch: Batch) -> list[bytes]:
    return [bytes(row.tolist()) for row in batch.tokens]


@pytest.fixture(name="small")
def small_corpus(tmp_path: Path) -> Corpus:
    return Corpus.load(write_text(tmp_path / "text", 16 * 1024))


def test_batches_depend_on_seed_step_and_micro_alone(small: Corpus) -> None:
    def draw(seed: int, step: int, micro: int) -> torch.Tensor:
        return small.training_batch(seed=seed, step=step, micro=micro, batch=4, seq=64).tokens

    again = Corpus.load(small.source)
    torch.testing.assert_close(
        draw(1, 2, 0), again.training_batch(seed=1, step=2, micro=0, batch=4, seq=64).tokens, rtol=0, atol=0
    )
    others = [draw(2, 2, 0), draw(1, 3, 0), draw(1, 2, 1)]
    assert not any(torch.equal(draw(1, 2, 0), other) for other in others)


def test_targets_are_the_bytes_that_follow(small: Corpus) -> None:
    batch = small.training_batch(seed=1, step=0, micro=0, batch=3, seq=32)
    assert batch.tokens.shape == batch.targets.shape == (3, 32)
    assert batch.tokens.dtype == batch.targets.dtype == torch.int64
    text = small.text.numpy().tobytes()
    for tokens, targets in zip(rows_of(batch), batch.targets, strict=True):
        assert tokens + bytes(targets[-1:].tolist()) in text
        assert tokens[1:] == bytes(targets[:-1].tolist())


def test_held_out_text_is_never_trained_on(small: Corpus) -> None:
    text = small.text.numpy().tobytes()
    held, trained = set(), set()
    for step in range(500):
        for row in rows_of(small.training_batch(seed=7, step=step, micro=0, batch=4, seq=64)):
            start = text.index(row)
            trained |= set(range(start, start + 65))
    for batch in small.held_out_batches(count=30, batch=4, seq=64):
        for row in rows_of(batch):
            start = text.index(row)
            held |= set(range(start, start + 65))
    assert held.isdisjoint(trained)
    assert len(held) == pytest.approx(len(text) / 16, rel=0.05)
    assert len(trained) > 0.9 * len(text)


def test_windows_reach_both_ends_of_a_block(tmp_path: Path) -> None:
    corpus = Corpus.load(write_text(tmp_path / "text", 16 * 80))
    text = corpus.text.numpy().tobytes()
    starts = {
        text.index(row) % 80
        for step in range(300)
        for row in rows_of(corpus.training_batch(seed=1, step=step, micro=0, batch=2, seq=30))
    }
    assert min(starts) == 0
    assert max(starts) == 80 - 31


def test_the_default_is_the_standard_library() -> None:
    corpus = Corpus.load()
    assert "standard library" in corpus.source
    assert len(corpus.text) > 5_000_000
    assert corpus.num_files > 300
    corpus.require(1024)
    assert corpus.prompt(seed=1, length=64).startswith(b"def ")


def test_a_folder_is_read_in_name_order_without_what_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_bytes(b"second" * 100)
    (tmp_path / "a.txt").write_bytes("erst ä".encode() * 100)
    (tmp_path / "picture").write_bytes(b"\x89PNG\x00\x00")
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / ".hidden").write_bytes(b"hidden")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "c").write_bytes(b"third")
    (tmp_path / "link").symlink_to(tmp_path / "a.txt")
    corpus = Corpus.load(tmp_path)
    assert corpus.text.numpy().tobytes() == "erst ä".encode() * 100 + b"second" * 100 + b"third"
    assert (corpus.num_files, corpus.skipped_files) == (3, 2)


def test_a_folder_stops_at_the_largest_corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus_module, "LARGEST_CORPUS_BYTES", 1000)
    for name in "abc":
        (tmp_path / name).write_bytes(name.encode() * 600)
    corpus = Corpus.load(tmp_path)
    assert corpus.text.numpy().tobytes() == b"a" * 600 + b"b" * 400
    assert (corpus.num_files, corpus.skipped_files) == (2, 1)


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"", "is empty"), (b"\x00\x01" * 500, "is a binary file"), (bytes(range(1, 32)), "binary")],
)
def test_files_that_are_no_text_are_refused_by_name(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "input"
    path.write_bytes(content)
    with pytest.raises(CorpusError, match=f"input.*{message}.*--text"):
        Corpus.load(path)


def test_folders_without_text_and_other_kinds_of_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match="found no files"):
        Corpus.load(tmp_path)
    (tmp_path / "empty").touch()
    with pytest.raises(CorpusError, match="found 1 files, all of them empty, binary or unreadable"):
        Corpus.load(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(CorpusError, match="neither a regular file nor a folder"):
        Corpus.load(tmp_path / "pipe")
    with pytest.raises(FileNotFoundError, match="nowhere"):
        Corpus.load(tmp_path / "nowhere")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_unreadable_files_and_folders_are_refused(tmp_path: Path) -> None:
    secret = write_text(tmp_path / "secret", 400)
    secret.chmod(0)
    with pytest.raises(PermissionError, match="secret"):
        Corpus.load(secret)


def test_a_text_that_is_too_small_says_how_much_is_needed(tmp_path: Path) -> None:
    path = write_text(tmp_path / "short", 16 * 130)
    corpus = Corpus.load(path)
    corpus.require(64)
    with pytest.raises(CorpusError, match="has 2080 bytes and --seq 65 needs at least 2112"):
        corpus.require(65)
    with pytest.raises(CorpusError, match="--seq 40000 is too long"):
        corpus.require(40000)
    write_text(path, 2112)
    Corpus.load(path).require(65)
