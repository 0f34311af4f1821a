"""What a process has inherited stays its own, also on uvloop, which closes nothing in the programs that it starts."""

from __future__ import annotations

import os
import subprocess
import sys

CODE = """
import asyncio, os, sys, uvloop
from asyncmoe.process import keep_files

async def start():
    code = f"import os\\ntry: os.fstat({sys.argv[1]})\\nexcept OSError: print('closed')\\nelse: print('open')"
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", code, stdout=asyncio.subprocess.PIPE)
    print((await process.communicate())[0].decode().strip(), flush=True)

uvloop.run(start())
keep_files()
os.fstat(int(sys.argv[1]))
uvloop.run(start())
"""


def test_programs_do_not_inherit_files() -> None:
    inherited = os.memfd_create("inherited")
    command = [sys.executable, "-c", CODE, str(inherited)]
    done = subprocess.run(command, pass_fds=[inherited], capture_output=True, text=True, check=False, timeout=60)
    os.close(inherited)
    assert done.stdout.split() == ["open", "closed"], done.stderr
