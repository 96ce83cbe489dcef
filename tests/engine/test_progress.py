"""Progress bar: silent without a terminal or for short work, else on stderr."""

from __future__ import annotations

from flashpage.engine import progress


def test_silent_where_nobody_watches(capsys, monkeypatch):
    monkeypatch.setattr(progress, "SHOW_AFTER_SECONDS", 0)
    with progress.Progress(3) as bar:
        bar.update(1, 10)
    assert capsys.readouterr() == ("", "")


def test_silent_for_short_work(capsys):
    with progress.Progress(3, enabled=True) as bar:
        bar.update(1, 10)
    assert capsys.readouterr() == ("", "")


def test_shows_requests_and_speed_on_stderr(capsys, monkeypatch):
    monkeypatch.setattr(progress, "SHOW_AFTER_SECONDS", 0)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "120")
    with progress.Progress(3, enabled=True) as bar:
        bar.update(1, 10)
        bar.update(3, 4321)
    out, err = capsys.readouterr()
    assert out == ""
    assert "3/3" in err
    assert "4321 tokens" in err
    assert "tokens/s" in err
