"""benchmarks/bootstrap.py: which Python it accepts, when it trusts `.venv`, how it gives up."""

import ast
import json
import os
import pathlib
import shutil
import sys
import tempfile
import threading
import types
from importlib import metadata
from unittest import mock

from absl.testing import absltest, parameterized

from benchmarks import bootstrap
from tests.base import TestCase

# What stand-ins of version managers do when no version of that name is active.
SHIM = "echo 'shim: python3.12: command not found' >&2; exit 127"


class VersionTest(TestCase):
  @parameterized.parameters(
    ("3.12", (3, 12)),
    ("0.11.2", (0, 11, 2)),
    ("0.13.0rc1", (0, 13, 0)),
    ("2.5.1+cu13", (2, 5, 1)),
    ("0.12.0.dev20260101", (0, 12, 0)),
  )
  def test_parse(self, text, version):
    self.assertEqual(bootstrap.parse_version(text), version)

  def test_parse_refuses_what_is_no_version(self):
    with self.assertRaisesRegex(ValueError, "'main' is not a version"):
      bootstrap.parse_version("main")

  @parameterized.parameters(
    ("0.11.2", ">=0.11.2,<0.13", True),
    ("0.12.7", ">=0.11.2,<0.13", True),
    ("0.11.1", ">=0.11.2,<0.13", False),
    ("0.13", ">=0.11.2,<0.13", False),
    ("0.13.0.dev1", ">=0.11.2, <0.13", False),
    ("0.9.9", ">=0.11.2", False),
    ("1.0", "==1", True),
    ("7", "", True),
  )
  def test_range(self, version, specifiers, expected):
    self.assertEqual(bootstrap.satisfies(version, specifiers), expected)

  def test_range_refuses_what_it_cannot_read(self):
    with self.assertRaisesRegex(ValueError, "cannot read the version range '~=1.2'"):
      bootstrap.satisfies("1.2", "~=1.2")


class RequirementTest(TestCase):
  def setUp(self):
    super().setUp()
    versions = {"jax": "0.11.2", "numpy": "2.5.1"}
    requires = ['plugin[cuda]>=1; extra == "cuda13"', 'numpy<2; extra == "old" and a == "b"']

    def version(name):
      if name not in versions:
        raise metadata.PackageNotFoundError(name)
      return versions[name]

    self.enter_context(mock.patch.object(metadata, "version", version))
    self.enter_context(mock.patch.object(metadata, "requires", lambda name: requires))

  @parameterized.parameters(
    ("numpy", []),
    ("jax>=0.11.2,<0.13", []),
    ("jax>=0.12", ["jax 0.11.2 is outside >=0.12"]),
    ("jax-triton>=0.4.1", ["jax-triton is not installed"]),
    ("jax[cuda13]>=0.11.2,<0.13", ["plugin is not installed"]),
    ("jax[old]", []),
  )
  def test_unmet(self, requirement, problems):
    self.assertEqual(bootstrap.unmet(requirement), problems)

  def test_unknown_extra_is_refused(self):
    with self.assertRaisesRegex(bootstrap.SetupError, "'qualty' is not an extra.*quality"):
      bootstrap.requirements(["qualty"])

  def test_old_python_is_said_first(self):
    with mock.patch.object(sys, "version_info", (3, 11, 7)):
      self.assertEqual(bootstrap.shortcomings(), ["Python 3.11.7 is older than 3.12"])


class ServingTest(TestCase):
  def test_a_machine_without_jax_triton_serves(self):
    """As GPU machines are, where nothing can be installed."""
    real = metadata.version

    def version(name):
      if name == "jax-triton":
        raise metadata.PackageNotFoundError(name)
      return real(name)

    with mock.patch.object(metadata, "version", version):
      self.assertEqual(bootstrap.shortcomings(), [])

  def test_a_machine_without_jax_does_not(self):
    def version(name):
      raise metadata.PackageNotFoundError(name)

    with mock.patch.object(metadata, "version", version):
      self.assertIn("jax is not installed", bootstrap.shortcomings())


class SyntaxTest(TestCase):
  def test_what_runs_before_the_environment_parses_on_an_old_python(self):
    entries = [*bootstrap.ROOT.glob("benchmarks/__*__.py"), *bootstrap.ROOT.glob("tests/__*__.py")]
    for path in [bootstrap.ROOT / "benchmarks" / "bootstrap.py", *entries]:
      with self.subTest(path=path.name):
        ast.parse(path.read_text(encoding="utf-8"), feature_version=(3, 8))


@absltest.skipIf(os.name == "nt", "the fake interpreters are shell scripts")
class FindPythonTest(TestCase):
  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(self.enter_context(tempfile.TemporaryDirectory()))

  def fake(self, name, script):
    path = self.folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)

  @parameterized.named_parameters(
    ("shim", SHIM, r"fails \(shim: python3.12: command not found\)"),
    ("silent", "exit 3", r"fails \(exit code 3\)"),
    ("old", "echo 3.11.7", "is Python 3.11.7"),
    ("other", "echo hello", "does not answer as Python does"),
  )
  def test_check_refuses(self, script, message):
    with self.assertRaisesRegex(bootstrap.SetupError, message):
      bootstrap.check_python(self.fake("python", script))

  def test_check_refuses_what_is_not_there(self):
    with self.assertRaisesRegex(bootstrap.SetupError, r"does not run \(FileNotFoundError\)"):
      bootstrap.check_python(self.folder / "python")

  def test_check_accepts(self):
    self.assertEqual(bootstrap.check_python(self.fake("python", "echo 3.13.0")), "3.13.0")
    self.assertEqual(bootstrap.check_python(sys.executable), "{}.{}.{}".format(*sys.version_info))

  def test_path_is_searched_by_name_then_by_folder(self):
    for name in ("a/python3.13", "a/python3", "b/python3.12", "b/python3.13", "b/python3.11"):
      self.fake(name, "echo 3.13.0")
    (self.folder / "a" / "python3.12").write_text("not executable")
    folders = [str(self.folder / name) for name in ("a", "b", "missing")]
    found = bootstrap.path_candidates(os.pathsep.join([*folders, ""]))
    self.assertEqual(
      [os.path.relpath(path, self.folder) for path in found],
      ["b/python3.12", "a/python3.13", "b/python3.13", "a/python3"],
    )

  def test_pyenv_versions_are_found_without_being_active(self):
    for name in ("3.9.18", "3.13.0", "3.12.10", "3.12.9", "pypy3.10-7.3"):
      self.fake(f"versions/{name}/bin/python", "")
    found = bootstrap.pyenv_candidates({"PYENV_ROOT": str(self.folder)})
    self.assertEqual(
      [pathlib.Path(path).parent.parent.name for path in found], ["3.12.9", "3.12.10", "3.13.0"]
    )

  def find(self, uv, hint=None, wanted=()):
    """find_python on a machine that has only the fake interpreters."""
    environ = {"PATH": str(self.folder / "path"), "PYENV_ROOT": str(self.folder / "pyenv")}
    running = self.fake("running", "echo 3.11.7")
    with (
      mock.patch.dict(os.environ, environ),
      mock.patch.object(bootstrap, "running_python", lambda: running),
      mock.patch.object(bootstrap, "find_uv", uv),
    ):
      return bootstrap.find_python(hint, self.folder, wanted)

  def no_uv(self, scratch):
    raise bootstrap.SetupError("cannot be fetched")

  def test_first_that_runs_is_taken(self):
    self.fake("path/python3.12", SHIM)
    python = self.fake("pyenv/versions/3.13.0/bin/python", "echo 3.13.0")
    self.assertEqual(self.find(self.no_uv), (python, "3.13.0"))

  def test_another_version_is_not_taken(self):
    self.fake("path/python3.12", "echo 3.12.1")
    python = self.fake("path/python3.13", "echo 3.13.0")
    self.assertEqual(self.find(self.no_uv, wanted=(3, 13)), (python, "3.13.0"))
    with self.assertRaisesRegex(
      bootstrap.SetupError, r"no Python 3.14 was found[\s\S]*is Python 3"
    ):
      self.find(self.no_uv, wanted=(3, 14))
    with self.assertRaisesRegex(bootstrap.SetupError, "is Python 3.13.0; Python 3.12 is needed"):
      self.find(self.no_uv, hint=python, wanted=(3, 12))

  def test_uv_is_asked_for_the_version(self):
    python = self.fake("managed", "echo 3.13.4")
    uv = self.fake("uv", f'[ "$2 $5" = "find ==3.13.*" ] && echo {python}')
    self.assertEqual(self.find(lambda scratch: uv, wanted=(3, 13)), (python, "3.13.4"))

  def test_uv_is_asked_last(self):
    python = self.fake("managed", "echo 3.12.4")
    uv = self.fake("uv", f'[ "$2" = find ] && echo a warning && echo {python}')
    self.assertEqual(self.find(lambda scratch: uv), (python, "3.12.4"))

  def test_uv_downloads_what_it_does_not_find(self):
    python, mark = self.fake("managed", "echo 3.12.4"), self.folder / "downloaded"
    script = f"if [ $2 = install ]; then : > {mark}; else [ -e {mark} ] && echo {python}; fi"
    uv = self.fake("uv", script)
    self.assertEqual(self.find(lambda scratch: uv), (python, "3.12.4"))

  def test_failure_says_what_was_tried_and_what_to_do(self):
    self.fake("path/python3.12", SHIM)
    with self.assertRaises(bootstrap.SetupError) as caught:
      self.find(self.no_uv)
    message = str(caught.exception)
    self.assertIn("running is Python 3.11.7", message)
    self.assertIn("path/python3.12 fails (shim: python3.12: command not found)", message)
    self.assertIn("uv cannot be fetched", message)
    self.assertIn("--python PATH", message)

  def test_hint_is_not_passed_over(self):
    self.fake("path/python3.12", "echo 3.12.1")
    old = self.fake("old", "echo 3.10.2")
    with self.assertRaisesRegex(bootstrap.SetupError, "--python .*old is Python 3.10.2"):
      self.find(self.no_uv, hint=old)


class FakeEnvironment(bootstrap.Environment):
  """An environment whose steps are recorded, not run; `problems` are found one after another."""

  def __init__(self, root, problems=(), **apart):
    super().__init__(root, **apart)
    self.steps = []
    self.problems = list(problems)

  def _usable(self):
    return self.python.exists()

  def _create(self, hint, scratch):
    bootstrap.remove(self.venv)
    self.python.parent.mkdir(parents=True)
    self.python.touch()
    self.steps.append("create")

  def _install_packages(self, extras, scratch):
    self.steps.append(f"install {','.join(extras)}")

  def _problem(self, extras, imports=()):
    return self.problems.pop(0) if self.problems else ""


class EnvironmentTest(TestCase):
  def setUp(self):
    super().setUp()
    self.root = pathlib.Path(self.enter_context(tempfile.TemporaryDirectory())) / "checkout"
    self.root.mkdir()
    (self.root / "pyproject.toml").write_text("[project]\n")
    self.enter_context(mock.patch.object(bootstrap, "say"))

  def prepare(self, extras=(), root=None, problems=()):
    """The steps that it took to prepare."""
    environment = FakeEnvironment(root or self.root, problems)
    self.assertEqual(environment.prepare(extras), str(environment.python))
    return environment.steps

  def test_second_run_does_nothing(self):
    self.assertEqual(self.prepare(["dev"]), ["create", "install dev"])
    self.assertEqual(self.prepare(["dev"]), [])
    self.assertEqual(self.prepare(), [])

  def test_extras_add_up(self):
    self.prepare(["dev"])
    self.assertEqual(self.prepare(["quality"]), ["install dev,quality"])
    self.assertEqual(self.prepare(["dev"]), [])

  def test_versions_and_pins_have_environments_of_their_own(self):
    self.prepare()
    other = FakeEnvironment(self.root, version="3.13", pins=["jax==0.11.2"])
    other.prepare()
    self.assertEqual(other.steps, ["create", "install "])
    self.assertEqual(other.venv.name, ".venv-3.13-jax-0.11.2")
    self.assertEqual(self.prepare(), [])

  def test_changed_pyproject_is_installed_again(self):
    self.prepare()
    (self.root / "pyproject.toml").write_text("[project]\nname = 'x'\n")
    self.assertEqual(self.prepare(), ["install "])

  def test_copied_checkout_is_installed_again(self):
    self.prepare()
    copy = self.root.parent / "copy"
    shutil.copytree(self.root, copy)
    self.assertEqual(self.prepare(root=copy), ["install "])

  @parameterized.parameters("", "{", "[]", '{"key": "x"}')
  def test_unreadable_stamp_is_not_trusted(self, text):
    self.prepare()
    FakeEnvironment(self.root).stamp.write_text(text)
    self.assertEqual(self.prepare(), ["install "])

  def test_unfinished_environment_is_made_anew(self):
    FakeEnvironment(self.root).venv.mkdir()
    self.assertEqual(self.prepare(), ["create", "install "])

  def test_package_that_went_missing_is_installed_again(self):
    self.prepare()
    missing = "numpy is not installed"  # found before and after taking the lock
    self.assertEqual(self.prepare(problems=[missing, missing]), ["install "])

  def test_damage_that_installing_does_not_mend_is_made_anew(self):
    self.prepare()
    steps = self.prepare(problems=["broken", "broken", "ImportError: numpy"])
    self.assertEqual(steps, ["install ", "create", "install "])

  def test_failure_leaves_no_stamp(self):
    environment = FakeEnvironment(self.root, ["ImportError: numpy"])
    with self.assertRaisesRegex(bootstrap.SetupError, "does not work: ImportError: numpy"):
      environment.prepare()
    self.assertFalse(environment.stamp.exists())

  def test_stamp_is_written_whole(self):
    self.prepare(["dev"])
    stamp = json.loads(FakeEnvironment(self.root).stamp.read_text())
    self.assertEqual(stamp["extras"], ["dev"])
    self.assertLen(list(FakeEnvironment(self.root).venv.glob("bootstrap.*")), 1)

  def test_simultaneous_runs_install_once(self):
    steps, inside, waiting = [], threading.Event(), threading.Event()

    class Slow(FakeEnvironment):
      def _install_packages(self, extras, scratch):
        inside.set()
        waiting.wait(30)  # until the other run has come to the lock
        steps.append("install")

    def say(message):
      if message.startswith("waits for another run"):
        waiting.set()

    with mock.patch.object(bootstrap, "say", say):
      threads = [threading.Thread(target=Slow(self.root).prepare) for _ in range(2)]
      threads[0].start()
      inside.wait(30)
      threads[1].start()
      for thread in threads:
        thread.join()
    self.assertEqual(steps, ["install"])

  def test_unwritable_place_is_said(self):
    with (
      mock.patch("builtins.open", side_effect=PermissionError("read-only")),
      self.assertRaisesRegex(bootstrap.SetupError, "cannot make .*read-only.* writable"),
    ):
      FakeEnvironment(self.root).prepare()


class EnsureTest(TestCase):
  def setUp(self):
    super().setUp()
    self.enter_context(mock.patch.object(bootstrap, "say"))
    self.enter_context(mock.patch.object(os, "name", "posix"))
    self.enter_context(mock.patch.dict(os.environ))
    main = types.SimpleNamespace(__spec__=types.SimpleNamespace(name="tests.__main__"))
    self.enter_context(mock.patch.dict(sys.modules, {"__main__": main}))
    self.enter_context(mock.patch.object(sys, "argv", ["path", "-k", "a b"]))
    self.execv = self.enter_context(mock.patch.object(os, "execv"))
    self.enter_context(
      mock.patch.object(bootstrap.Environment, "prepare", lambda self, extras: "/venv/python")
    )

  def test_python_that_has_everything_goes_on(self):
    with mock.patch.object(bootstrap, "shortcomings", lambda extras: []):
      bootstrap.ensure()
    self.execv.assert_not_called()

  def test_other_python_runs_the_same_command_again(self):
    with mock.patch.object(bootstrap, "shortcomings", lambda extras: ["too old"]):
      bootstrap.ensure()
    self.execv.assert_called_once_with("/venv/python", ["/venv/python", "-m", "tests", "-k", "a b"])

  def test_restart_that_helps_nothing_is_not_repeated(self):
    with mock.patch.object(bootstrap, "shortcomings", lambda extras: ["no numpy"]):
      bootstrap.ensure()
      with self.assertRaisesRegex(SystemExit, "was prepared, but no numpy"):
        bootstrap.ensure()
    self.execv.assert_called_once()


if __name__ == "__main__":
  absltest.main()
