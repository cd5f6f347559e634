"""Makes the commands of this repository run on a machine where nothing is installed.

`python3 -m benchmarks` and `python3 -m tests` call `ensure()` first. A Python that already has
what pyproject.toml asks for is used as it is. Otherwise `.venv` is made in the repository, the
repository is installed there in editable mode, and the same command starts again in it.

    python3 -m benchmarks.bootstrap [--extra NAME ...] [--python PATH]

only prepares, and prints the interpreter to use. With `--version 3.13` and `--pin PACKAGE==VERSION`
that is one of such a Python and such packages, in an environment of its own.

Standard library only, and nothing newer than Python 3.8: the default Python of a fresh machine
may be old. The commands' own `__main__` files must parse there too.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib.util
import json
import operator
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

try:
  import fcntl
except ImportError:  # Windows: two first runs at the same time are not kept apart there.
  fcntl = None

ROOT = Path(__file__).resolve().parent.parent
OLDEST_PYTHON = (3, 12)
# Oldest first: new Pythons wait longest for wheels of every dependency.
PYTHON_NAMES = ("python3.12", "python3.13", "python3.14", "python3.15", "python3", "python")
MODULES = ("jax", "jaxlib", "numpy", "absl")
# Installed with the rest, but a Python without it serves: only kernels for sm_120 import it.
NOT_NEEDED = ("jax-triton",)

_RESTARTED = "NVFP4_PALLAS_RESTARTED"  # set across a restart, so that a failure is not a loop
_HEARTBEAT_S = 20.0
_COMPARE = {
  ">=": operator.ge,
  "<=": operator.le,
  "==": operator.eq,
  ">": operator.gt,
  "<": operator.lt,
}


class SetupError(Exception):
  """Nothing usable could be prepared; the message says what the user can do."""


def say(message):
  print("bootstrap: " + message, file=sys.stderr, flush=True)


# What an interpreter must have


def parse_version(text):
  """The release numbers of a version: "0.11.2" and "0.11.2rc1" are both (0, 11, 2)."""
  match = re.match(r"\d+(?:\.\d+)*", text)
  if match is None:
    raise ValueError(f"{text!r} is not a version")
  return tuple(int(part) for part in match.group().split("."))


def satisfies(version, specifiers):
  """Whether a version lies in a range such as ">=0.11.2,<0.13"; an empty range admits all."""
  for clause in filter(None, specifiers.replace(" ", "").split(",")):
    match = re.match(r"(>=|<=|==|>|<)(.+)", clause)
    if match is None:
      raise ValueError(f"cannot read the version range {specifiers!r}")
    have, bound = parse_version(version), parse_version(match.group(2))
    width = max(len(have), len(bound))  # so that 0.13 equals 0.13.0
    have, bound = (v + (0,) * (width - len(v)) for v in (have, bound))
    if not _COMPARE[match.group(1)](have, bound):
      return False
  return True


def requirements(extras):
  """The requirement lines of pyproject.toml; only for Pythons that can be used at all."""
  import tomllib  # Python 3.11

  project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
  lines, optional = list(project["dependencies"]), project["optional-dependencies"]
  for extra in extras:
    if extra not in optional:
      raise SetupError(f"{extra!r} is not an extra of pyproject.toml; it has {sorted(optional)}")
    lines += optional[extra]
  return lines


def unmet(requirement):
  """Why the running interpreter does not meet one requirement line; empty if it does."""
  from importlib import metadata

  match = re.match(r"([\w.-]+)(?:\[([\w,-]+)\])?\s*([^;]*)", requirement)
  if match is None:
    raise ValueError(f"cannot read the requirement {requirement!r}")
  name, nested, specifiers = match.groups()
  try:
    version = metadata.version(name)
  except metadata.PackageNotFoundError:
    return [f"{name} is not installed"]
  if not satisfies(version, specifiers):
    return [f"{name} {version} is outside {specifiers.strip()}"]
  problems = []
  for extra in nested.split(",") if nested else ():
    # Lines with a further condition are left to pip.
    only_extra = re.compile(rf"([\w.-]+).*;\s*extra\s*==\s*['\"]{extra}['\"]\s*$")
    for match in filter(None, map(only_extra.match, metadata.requires(name) or ())):
      problems += unmet(match.group(1))
  return problems


def shortcomings(extras=()):
  """Why the running interpreter cannot serve, as short phrases; empty if it can."""
  if sys.version_info < OLDEST_PYTHON:
    return ["Python {}.{}.{} is older than {}.{}".format(*sys.version_info[:3], *OLDEST_PYTHON)]
  needed = [line for line in requirements(extras) if not line.startswith(NOT_NEEDED)]
  problems = [problem for line in needed for problem in unmet(line)]
  absent = [name for name in MODULES if importlib.util.find_spec(name) is None]
  return problems or [f"module {name} cannot be found" for name in absent]


# Finding a Python


def run_step(command, what, scratch):
  """Runs a command and returns what it printed; says now and then that it still runs."""
  log = scratch / "step.log"
  began = time.monotonic()
  with open(str(log), "w") as output:
    process = subprocess.Popen(
      command,
      stdin=subprocess.DEVNULL,
      stdout=output,
      stderr=subprocess.STDOUT,
      env=dict(os.environ, PIP_USER="0"),  # a user-wide `user = true` fails in an environment
      close_fds=False,  # see _locked
    )
    try:
      while process.poll() is None:
        try:
          process.wait(timeout=_HEARTBEAT_S)
        except subprocess.TimeoutExpired:
          lines = log.read_text(errors="replace").strip().splitlines() or [""]
          say(f"still {what}, {time.monotonic() - began:.0f} s: {lines[-1].strip()[:60]}")
    finally:
      if process.poll() is None:
        process.kill()
  printed = log.read_text(errors="replace").strip()
  if process.returncode != 0:
    tail = "\n".join("  " + line for line in printed.splitlines()[-15:])
    raise SetupError(f"{what} failed with exit code {process.returncode}:\n{tail}")
  return printed


def has_pip(python):
  command = [str(python), "-m", "pip", "--version"]
  quiet = subprocess.DEVNULL
  return subprocess.run(command, stdin=quiet, stdout=quiet, stderr=quiet).returncode == 0


def venv_python(folder):
  return folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def check_python(python, wanted=()):
  """The version of an interpreter that can be used; SetupError says why it cannot.

  With `wanted`, such as (3, 13), no other version can. To exist is not enough: version managers
  put stand-ins on PATH that fail when called.
  """
  code = "import sys; print('{}.{}.{}'.format(*sys.version_info))"
  try:
    done = subprocess.run(
      [str(python), "-I", "-c", code],
      stdin=subprocess.DEVNULL,
      capture_output=True,
      timeout=30,
      text=True,
    )
  except (OSError, subprocess.TimeoutExpired) as error:
    raise SetupError(f"does not run ({type(error).__name__})") from error
  if done.returncode != 0:
    said = done.stderr.strip() or f"exit code {done.returncode}"
    raise SetupError(f"fails ({said.splitlines()[0]})")
  version = done.stdout.strip()
  try:
    new_enough = parse_version(version) >= OLDEST_PYTHON
  except ValueError as error:
    raise SetupError("does not answer as Python does") from error
  if not new_enough or parse_version(version)[: len(wanted)] != tuple(wanted):
    raise SetupError(f"is Python {version}")
  return version


def path_candidates(path):
  """The Pythons in the folders of a PATH variable, best name first."""
  suffix = ".exe" if os.name == "nt" else ""
  for name in PYTHON_NAMES:
    for folder in path.split(os.pathsep):
      candidate = os.path.join(folder, name + suffix)
      if folder and os.path.isfile(candidate) and os.access(candidate, os.X_OK):
        yield candidate


def pyenv_candidates(environ):
  """The Pythons that pyenv installed, oldest usable first, whether or not one is activated."""
  home = environ.get("PYENV_ROOT") or os.path.join(os.path.expanduser("~"), ".pyenv")
  folder = os.path.join(home, "versions")
  names = [n for n in (os.listdir(folder) if os.path.isdir(folder) else ()) if n[:1].isdigit()]
  for name in sorted(names, key=parse_version):
    if parse_version(name) >= OLDEST_PYTHON:
      yield os.path.join(folder, name, "bin", "python")


def running_python():
  """The running interpreter, seen through `.venv`, which may be about to be removed."""
  return getattr(sys, "_base_executable", None) or sys.executable


def find_uv(scratch):
  """uv from PATH, or one that pip puts into the scratch folder."""
  uv = shutil.which("uv") or shutil.which("uv", path=str(scratch / "uv" / "bin"))
  if uv is not None:
    return uv
  say("fetching uv, only for this step")
  python = sys.executable
  if not has_pip(python):
    run_step([python, "-m", "venv", str(scratch / "pip")], "making a place for pip", scratch)
    python = str(venv_python(scratch / "pip"))
  install = [python, "-m", "pip", "install", "--target", str(scratch / "uv"), "uv"]
  run_step(install, "installing uv", scratch)
  uv = shutil.which("uv", path=str(scratch / "uv" / "bin"))
  if uv is None:
    raise SetupError("pip installed uv without its program")
  return uv


def uv_python(uv, scratch, wanted=()):
  """The Python that uv finds, else one that it downloads."""
  oldest = ".".join(map(str, wanted or OLDEST_PYTHON))
  versions = f"=={oldest}.*" if wanted else f">={oldest}"
  find = [uv, "python", "find", "--no-project", "--system", versions]
  try:
    printed = run_step(find, "asking uv for a Python", scratch)
  except SetupError:
    say(f"letting uv download Python {oldest}")
    run_step([uv, "python", "install", oldest], "downloading Python", scratch)
    printed = run_step(find + ["--managed-python"], "asking uv for a Python", scratch)
  return printed.splitlines()[-1]  # warnings come before the path


def find_python(hint, scratch, wanted=()):
  """(path, version) of a Python that can be used. A hint is an order, not a suggestion."""
  needed = "Python " + (".".join(map(str, wanted)) if wanted else "3.12 or newer")
  if hint is not None:
    try:
      return hint, check_python(hint, wanted)
    except SetupError as error:
      raise SetupError(f"--python {hint} {error}; {needed} is needed") from error

  tried = {}
  path_variable = os.environ.get("PATH", "")
  for path in [running_python(), *path_candidates(path_variable), *pyenv_candidates(os.environ)]:
    try:
      if path not in tried:
        return path, check_python(path, wanted)
    except SetupError as error:
      tried[path] = error
  try:
    path = uv_python(find_uv(scratch), scratch, wanted)
    return path, check_python(path, wanted)
  except SetupError as error:
    tried["uv"] = error
  looked = "\n".join(f"  {what} {reason}" for what, reason in tried.items())
  raise SetupError(
    f"no {needed} was found. Looked at the running Python, PATH, pyenv and uv:\n"
    f"{looked}\n"
    "Install one (for example: apt install python3.12-venv, brew install python@3.12, or\n"
    "uv python install 3.12) and run the command again, or name one with\n"
    "  python3 -m benchmarks.bootstrap --python PATH"
  )


# The environment and the command in it


def remove(path):
  if path.is_symlink():
    path.unlink()
  elif path.exists():
    shutil.rmtree(str(path))


class Environment:
  """A virtual environment of one checkout: `.venv`, or `.venv-...` for a version and pins.

  `bootstrap.json` in it is its stamp, written last: without the stamp, or with one of another
  pyproject.toml, another place or fewer extras, the environment is not trusted.

  Arguments:
    version: of Python, such as "3.13"; empty for any that can be used.
    pins: packages with their versions, "jax==0.11.2".
  """

  def __init__(self, root=ROOT, version="", pins=()):
    self.root = Path(root)
    self.version, self.pins = version, tuple(pins)
    names = [".venv", *filter(None, [version]), *self.pins]
    self.venv = self.root / "-".join(names).replace("==", "-")
    self.stamp = self.venv / "bootstrap.json"
    self.python = venv_python(self.venv)

  def prepare(self, extras=(), hint=None):
    """Returns the path of an interpreter with the project and its extras installed."""
    if self.ready(extras):
      return str(self.python)
    try:
      with self._locked(), tempfile.TemporaryDirectory(prefix="nvfp4_pallas_") as scratch:
        if not self.ready(extras):  # another run may have made it in the meantime
          self._install(extras, hint, Path(scratch))
    except OSError as error:
      raise SetupError(
        f"cannot make {self.venv}: {error}. Make {self.root} writable, or use a Python that has"
        " everything that pyproject.toml names."
      ) from error
    return str(self.python)

  def ready(self, extras):
    """Whether the environment is whole and has the extras."""
    stamp = self._read_stamp()
    if stamp["key"] != self._key() or not set(extras) <= set(stamp["extras"]):
      return False
    return not self._problem(extras)

  def _key(self):
    # The place counts too: an editable install in a copied checkout points to the original.
    text = (self.root / "pyproject.toml").read_bytes() + os.fsencode(str(self.root))
    return hashlib.sha256(text).hexdigest()

  def _read_stamp(self):
    try:
      stamp = json.loads(self.stamp.read_text(encoding="utf-8"))
      return {"key": stamp["key"], "extras": list(stamp["extras"])}
    except (OSError, ValueError, LookupError, TypeError):
      return {"key": None, "extras": []}

  def _write_stamp(self, extras):
    partial = self.stamp.with_suffix(".partial")
    partial.write_text(json.dumps({"key": self._key(), "extras": extras}), encoding="utf-8")
    os.replace(str(partial), str(self.stamp))

  @contextlib.contextmanager
  def _locked(self):
    with open(str(self.root / f"{self.venv.name}.lock"), "w") as lock:
      if fcntl is not None:
        try:
          fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
          say(f"waits for another run that is preparing {self.venv.name}")
          fcntl.flock(lock, fcntl.LOCK_EX)
        # Installers inherit the lock: if this process is killed, it is held until they end.
        os.set_inheritable(lock.fileno(), True)
      yield

  def _install(self, extras, hint, scratch):
    # What an earlier run installed stays: two commands must not undo each other's extras.
    extras = sorted({*extras, *self._read_stamp()["extras"]})
    if self.stamp.exists():
      self.stamp.unlink()
    old = self.venv.exists()
    if old and not self._usable():
      say(f"{self.venv} is unfinished or broken: making it anew")
      old = False
    if not old:
      self._create(hint, scratch)
    self._install_packages(extras, scratch)
    problem = self._problem(extras, MODULES)
    if problem and old:
      say(f"{self.venv} is damaged ({problem}): making it anew")
      self._create(hint, scratch)
      self._install_packages(extras, scratch)
      problem = self._problem(extras, MODULES)
    if problem:
      raise SetupError(
        f"everything was installed into {self.venv}, but it does not work: {problem}"
      )
    self._write_stamp(extras)

  def _usable(self):
    try:
      check_python(self.python)
    except SetupError:
      return False
    return has_pip(self.python)

  def _create(self, hint, scratch):
    remove(self.venv)
    wanted = parse_version(self.version) if self.version else ()
    python, version = find_python(hint, scratch, wanted)
    say(f"making {self.venv} with {python} (Python {version})")
    plain = [python, "-m", "venv", str(self.venv)]
    try:
      run_step(plain, "making the environment", scratch)
    except SetupError as error:  # Debian's Python comes without the packages `venv` needs
      remove(self.venv)
      say("this Python cannot make environments: trying uv")
      try:
        uv = find_uv(scratch)
        seeded = [uv, "venv", "--quiet", "--seed", "--python", python, str(self.venv)]
        run_step(seeded, "making the environment", scratch)
      except SetupError:
        raise SetupError(
          f"{error}\nInstall the venv module of this Python (on Debian and Ubuntu:"
          " apt install python3-venv) or uv, and run the command again."
        ) from None

  def _install_packages(self, extras, scratch):
    target = str(self.root) + ("[" + ",".join(extras) + "]" if extras else "")
    pip = [str(self.python), "-m", "pip", "--no-input", "--disable-pip-version-check"]
    say("installing jax and what else the project needs (a minute or two)")
    run_step([*pip, "install", "--editable", target, *self.pins], "installing", scratch)

  def _problem(self, extras, imports=()):
    """Why the environment does not work, or ""; imports find what broken packages still claim."""
    if not self.python.exists():
      return "it has no Python"
    code = (
      f"import {', '.join(('sys', *imports))}\n"
      "from benchmarks import bootstrap\n"
      f"sys.exit('; '.join(bootstrap.shortcomings({tuple(extras)!r})) or None)"
    )
    done = subprocess.run(
      [str(self.python), "-c", code],
      cwd=str(self.root),
      stdin=subprocess.DEVNULL,
      stdout=subprocess.DEVNULL,
      stderr=subprocess.PIPE,
      text=True,
    )
    lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
    return lines[-1] if done.returncode else ""


def restart(python):
  """Runs the command of this process again, with another interpreter."""
  main = getattr(sys.modules["__main__"], "__spec__", None)
  if main is None:
    raise SetupError("start this with python3 -m, from the root of the repository")
  module = re.sub(r"\.__main__$", "", main.name)
  command = [python, "-m", module] + sys.argv[1:]
  os.environ[_RESTARTED] = "1"
  sys.stdout.flush()
  sys.stderr.flush()
  if os.name == "nt":  # exec there returns to the shell before the command ends
    sys.exit(subprocess.call(command))
  os.execv(python, command)


def ensure(extras=()):
  """Returns if the running interpreter can serve, else runs the command again in `.venv`."""
  restarted = os.environ.pop(_RESTARTED, None)
  try:
    problems = shortcomings(extras)
    if not problems:
      return
    if restarted:
      raise SetupError(f"{sys.executable} was prepared, but {'; '.join(problems)}")
    environment = Environment()
    say(f"{problems[0]}: going on in {environment.venv}")
    restart(environment.prepare(extras))
  except SetupError as error:
    sys.exit(f"bootstrap: {error}")


def main():
  parser = argparse.ArgumentParser(prog="python3 -m benchmarks.bootstrap")
  parser.add_argument("--extra", action="append", default=[], help="an extra of pyproject.toml")
  parser.add_argument("--python", help="make the environment with this interpreter")
  parser.add_argument("--version", default="", help="of Python, such as 3.13")
  parser.add_argument("--pin", action="append", default=[], help="such as jax==0.11.2")
  options = parser.parse_args()
  apart = options.python or options.version or options.pin
  try:
    if not apart and not shortcomings(options.extra):
      print(sys.executable)
    else:
      environment = Environment(version=options.version, pins=options.pin)
      print(environment.prepare(options.extra, options.python))
  except SetupError as error:
    sys.exit(f"bootstrap: {error}")


if __name__ == "__main__":
  main()
