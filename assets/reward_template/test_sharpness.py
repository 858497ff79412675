"""The rules of every reward, on the calibration set."""

from sharpness import Sharpness

from flowrl_img.rewards.audit import audit, calibration_set


def test_the_rules_of_a_reward_are_kept():
    reward = Sharpness()
    broken = [finding for finding in audit(reward, calibration_set(reward)) if finding.ok is False]
    assert not broken
