import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]


def test_the_profile_of_an_epoch_accounts_for_all_of_its_time(tiny_config, tmp_path):
    config = tiny_config(objective={"name": "nft"}, rewards=[{"name": "jpeg"}])
    file = tmp_path / "tiny.yaml"
    file.write_text(yaml.safe_dump(config.model_dump(mode="json", exclude={"name"})))
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "profile_epoch.py"), str(file)], capture_output=True, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    shares = {name: share for name, share in found.items() if name not in ("recipe", "seconds")}
    assert set(shares) == {"network", "text encoder", "autoencoder", "rewards", "own"}
    assert all(share > 0 for share in shares.values())
    assert sum(shares.values()) == pytest.approx(1, abs=1e-3)
