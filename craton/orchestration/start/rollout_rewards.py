"""Checks of a grpo job before its ranks start. The first rewards are computed, the teacher is asked."""

from __future__ import annotations

from pathlib import Path

from craton.job import Job
from craton.job.model import is_reward_model, load_config
from craton.job.sections.posttraining import ApiEndpoint
from craton.ml import search_folder
from craton.ml.data import check_other_model, open_prompts
from craton.ml.serving.clients import TeacherEndpoint
from craton.ml.verifiers import VerifierError, VerifierPool, VerifierSample

TRIED = 2  # prompts


def check_rollout_job(job: Job, folder: Path) -> None:
    """Raise CratonError if a reward fails on each of the first prompts, answered with what the row says is right; if a
    teacher does not return log-probabilities; or if this machine cannot isolate what needs isolation. `folder` is
    searched for users' functions first."""
    assert job.rollout is not None
    assert job.policy is not None
    assert job.verify is not None
    if isinstance(job.policy.teacher, ApiEndpoint):
        TeacherEndpoint(job.policy.teacher).check()
    search_folder(folder)
    for key, place in _other_models(job).items():
        check_other_model(job, place, key)
    for number, term in enumerate(job.reward):
        if term.model is not None and not is_reward_model(load_config(Path(term.model))[0]):
            raise VerifierError(
                f"{job.where('reward')}reward[{number}].model: {term.model} is a language model without a scalar head; "
                "give an export of `kind: dpo` with `preference: {loss: reward}`, or another folder for sequence "
                "classification with one label"
            )
    terms = [term for term in job.reward if term.model is None]
    if not terms and job.rollout.environment is None:
        return
    verify = job.verify.model_copy(update={"workers": 1})
    with VerifierPool(job.reward, verify, folder, environment=job.rollout.environment) as pool:
        if job.rollout.environment is not None:
            return
        prompts = open_prompts(job)
        samples = [prompts.prompt(index) for index in range(TRIED)]
        field = next((term.answer_field for term in terms), "")
        verdicts = pool.verify(
            [VerifierSample(prompt.content, str(prompt.row.get(field, "")), prompt.row) for prompt in samples]
        )
    if all(verdict.reward is None for verdict in verdicts):
        raise VerifierError(f"{job.where('reward')}the first prompts get no reward: {verdicts[0].error}")


def _other_models(job: Job) -> dict[str, str]:
    """Return the folders of models beside the policy, by their keys."""
    assert job.policy is not None
    policy = job.policy
    folders = {f"reward[{number}].model": term.model for number, term in enumerate(job.reward)}
    folders["policy.reference"] = None if policy.reference == "start" else policy.reference
    folders["policy.teacher"] = policy.teacher if isinstance(policy.teacher, str) else None
    return {key: folder for key, folder in folders.items() if folder is not None}
