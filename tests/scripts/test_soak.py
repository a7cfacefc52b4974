"""A short soak: kills in a save and elsewhere, then other numbers of ranks and other splits."""

from scripts import soak


def test_nothing_is_lost(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(soak, "MOMENTS", ["a save"])
    assert soak.soak(tmp_path, kills=2, seed=0, async_mode="async") == []
    assert "killed: 60 of 60 losses bit-identical" in capsys.readouterr().out


def write_run(folder, losses, rows):
    (folder / "ledger").mkdir(parents=True)
    lines = [f'{{"step": {step}, "loss": {loss}}}\n' for step, loss in losses.items()]
    (folder / "metrics.jsonl").write_text("".join(lines))
    (folder / "ledger" / "1.jsonl").write_text("".join(f'[{s}, {r}, "{d}"]\n' for (s, r), d in rows.items()))
    return folder


def test_what_differs_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr(soak, "STEPS", 2)
    monkeypatch.setattr(soak, "LANES", 1)
    losses, rows = {1: 4.0, 2: 3.0}, {(1, 0): "a", (2, 0): "b"}
    reference = write_run(tmp_path / "reference", losses, rows)

    def faults(name, **changes):
        folder = write_run(tmp_path / name, changes.get("losses", losses), changes.get("rows", rows))
        return soak.compare(name, folder, reference, tolerance=0)

    assert faults("same") == []
    assert "step 2" in faults("another loss", losses={1: 4.0, 2: 3.0000001})[0]
    assert len(faults("NaN", losses={1: 4.0, 2: "NaN"})) == 1
    assert "logged the steps [1]" in faults("a step is missing", losses={1: 4.0})[0]
    assert "other rows were read" in faults("a token twice", rows={(1, 0): "a", (2, 0): "a"})[0]
    assert "other rows were read" in faults("a row is missing", rows={(1, 0): "a"})[0]
