"""`python -m flashpage.compat`: runs a program that asks for flash_attn, and gives it flashpage."""

from __future__ import annotations

import os
import subprocess
import sys

from flashpage.compat.flash_attn import search_path

USAGE = """\
usage: python -m flashpage.compat PROGRAM.py [ARGS...]     run a program
       python -m flashpage.compat -m MODULE [ARGS...]      run a module
       python -m flashpage.compat -c CODE [ARGS...]        run a line of code
       python -m flashpage.compat --path                   print what to put into PYTHONPATH

In that program and in the Python processes that it starts, `import flash_attn` is flashpage.
All else is as with `python` itself, whose options may stand before the program."""


def main(arguments: list[str]) -> int:
    """Run `python *arguments` with the shim first on its module search path."""
    if arguments == ["--path"]:
        print(search_path())
        return 0
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE, file=sys.stdout if arguments else sys.stderr)
        return 0 if arguments else 2
    inherited = os.environ.get("PYTHONPATH")
    path = os.pathsep.join([search_path(), inherited] if inherited else [search_path()])
    environment = {**os.environ, "PYTHONPATH": path}
    command = [sys.executable, *arguments]
    if os.name == "posix":
        # The program takes the place of this process: signals, terminal and exit code are its own.
        os.execve(sys.executable, command, environment)
    return subprocess.run(command, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
