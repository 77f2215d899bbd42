"""Completion in a shell, and commands by their old names in a process of their own."""

import subprocess
import sys
from pathlib import Path

import pytest

COMMAND = Path(sys.executable).parent / "ackstate"


@pytest.mark.slow
def test_bash_completes_a_command_with_the_script(tmp_path):
    script = f"""
        PATH={COMMAND.parent}:$PATH
        eval "$(_ACKSTATE_COMPLETE=source_bash ackstate)"
        COMP_WORDS=(ackstate exp) COMP_CWORD=1
        function=$(complete -p ackstate | sed 's/.* -F \\(\\S*\\) .*/\\1/')
        "$function" ackstate
        echo "${{COMPREPLY[@]}}"
    """
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert (done.stdout, done.stderr) == ("explain\n", "")
