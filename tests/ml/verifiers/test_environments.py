"""Environments of several turns: state, errors, limits, processes that die, and the worked example."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from verifier_pools import open_pool, processes_below, sample
from waiting import wait_until

from craton.ml.verifiers import Turn, VerifierError

EXAMPLES = Path(__file__).parents[3] / "examples"
ENVIRONMENTS = '''
import os, random, time

class Counting:
    """Counts the turns; ends with a reward, without one, or badly."""

    def reset(self, row):
        self.turns = 0
        self.row = row
        return row.get("begin")

    def step(self, completion):
        self.turns += 1
        if completion == "hang":
            time.sleep(1000)
        if completion == "raise":
            raise RuntimeError("broken")
        if completion == "nan":
            return float("nan")
        if completion == "gym":
            return "x", 1.0, True
        if completion == "end":
            return None
        if completion == "reward":
            return self.turns
        return f"turn {self.turns}, process {os.getpid() if completion == 'pid' else 0}"

class Random:
    def reset(self, row):
        return "begin"

    def step(self, completion):
        return str(random.SystemRandom().random())

class Half:
    def reset(self, row):
        return 3
'''


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "own_environments.py").write_text(ENVIRONMENTS)
    return tmp_path


def without_seconds(turn: Turn) -> tuple[object, ...]:
    return turn.text, turn.reward, turn.is_last, turn.error


def test_the_calculator_example() -> None:
    opened = open_pool(folder=EXAMPLES, environment="custom_environment:Calculator")
    with opened as pool, pool.start_episode() as episode:
        first = episode.reset({"prompt": "What is 12 * 7 + 1?", "answer": "85"}).result()
        assert isinstance(first.text, str)
        assert first.text.startswith("What is 12 * 7 + 1?\nUse <calculate>")
        turn = episode.step("Let me see: <calculate>12 * 7 + 1</calculate>").result()
        assert without_seconds(turn) == ("\n<result>85</result>\n", None, False, "")
        wrong = episode.step("<calculate>__import__('os')</calculate>").result()
        assert str(wrong.text).startswith("\n<result>error: ")
        assert without_seconds(episode.step("It is 85.").result()) == (None, None, True, "")


def test_episodes_keep_their_own_state(folder: Path) -> None:
    """Many episodes at once, more than workers, each with an instance and a process of its own."""
    with open_pool(folder=folder, environment="own_environments:Counting", workers=2) as pool:
        episodes = [pool.start_episode() for _ in range(12)]
        begins = [episode.reset({"begin": f"row {number}"}) for number, episode in enumerate(episodes)]
        assert [begin.result().text for begin in begins] == [f"row {number}" for number in range(12)]
        for turn in (1, 2):
            steps = [episode.step("go") for episode in episodes]
            assert {step.result().text for step in steps} == {f"turn {turn}, process 0"}
        rewards = [episode.step("reward").result() for episode in episodes]
        assert [(turn.reward, turn.is_last) for turn in rewards] == [(3.0, True)] * 12
        for episode in episodes:
            episode.close()
            episode.close()
        wait_until(lambda: len(processes_below(pool.supervisor_pid)) <= 1, "only the template is left")


def test_a_bad_step_costs_its_own_episode(folder: Path) -> None:
    with open_pool(folder=folder, environment="own_environments:Counting", limit=2) as pool:
        episodes = {name: pool.start_episode() for name in ("hang", "raise", "nan", "gym", "end", "fine")}
        for episode in episodes.values():
            assert episode.reset({}).result().text is None
        steps = {name: episode.step(name) for name, episode in episodes.items()}
        turns = {name: step.result() for name, step in steps.items()}
        assert "exceeded verify.limit of 2 s" in turns["hang"].error
        assert "RuntimeError: broken" in turns["raise"].error
        assert "returned nan" in turns["nan"].error
        error = turns["gym"].error
        assert "returned ('x', 1.0, True) (tuple); return a finite number as the reward, a text as the next" in error
        assert all(turns[name].is_last for name in ("hang", "raise", "nan", "gym", "end"))
        assert without_seconds(turns["end"]) == (None, None, True, "")
        assert turns["fine"].text == "turn 1, process 0"
        assert "exceeded verify.limit" in episodes["hang"].step("more").result().error


def test_an_episode_is_replayed_when_its_process_dies(folder: Path) -> None:
    with open_pool(folder=folder, environment="own_environments:Counting") as pool, pool.start_episode() as episode:
        episode.reset({"begin": "x"}).result()
        assert episode.step("go").result().text == "turn 1, process 0"
        (pid,) = wait_until(lambda: pool.worker_pids, "the process of the episode")
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: pid not in pool.worker_pids, "its end")
        assert episode.step("go").result().text == "turn 2, process 0"
        os.kill(pool.supervisor_pid, signal.SIGKILL)
        assert episode.step("go").result().text == "turn 3, process 0"


def test_an_environment_that_replays_differently_ends_its_episode(folder: Path) -> None:
    with open_pool(folder=folder, environment="own_environments:Random") as pool, pool.start_episode() as episode:
        episode.reset({}).result()
        episode.step("go").result()
        (pid,) = wait_until(lambda: pool.worker_pids, "the process of the episode")
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: pid not in pool.worker_pids, "its end")
        turn = episode.step("go").result()
        assert turn.is_last
        assert "wrote something else when it was replayed" in turn.error


def test_an_environment_without_its_methods_is_refused(folder: Path) -> None:
    with pytest.raises(VerifierError, match=r"own_environments:Half has no method step; .* has reset and step"):
        open_pool(folder=folder, environment="own_environments:Half")


def test_an_environment_and_rewards_share_a_pool(folder: Path) -> None:
    (folder / "more.py").write_text("def score(prompt, completion, row, transcript): return len(transcript)\n")
    with open_pool({"python": "more:score"}, folder=folder, environment="own_environments:Counting") as pool:
        with pool.start_episode() as episode:
            episode.reset({}).result()
            assert episode.step("end").result().is_last
        assert pool.verify([sample("x")])[0].reward == 0.0
