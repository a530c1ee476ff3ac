"""Every bad combination fed as facts; the self-test once for real and with children that fail."""

import argparse
import sys
from dataclasses import replace

import pytest

from labs._harness import doctor, runtime
from labs._harness.doctor import Facts, Finding, Result

LAPTOP = Facts()
H200 = Facts(
    torch_cuda="13.0",
    arch_list=("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120"),
    nvidia="NVIDIA H200",
    driver="580.65.06",
    driver_cuda="13.0",
    cuda_available=True,
    card="NVIDIA H200",
    capability=(9, 0),
    shared_memory=232448,
    multiprocessors=132,
    memory=150 * 2**30,
    cards=1,
    interpret=False,
    device="cuda",
)
T4 = replace(H200, card="Tesla T4", nvidia="Tesla T4", capability=(7, 5), interpret=True)
RTX5060 = replace(H200, card="NVIDIA GeForce RTX 5060", capability=(12, 0), shared_memory=101376)
OLD_ARCHS = ("sm_50", "sm_80", "sm_86", "sm_90")
NO_CUDA = replace(H200, cuda_available=False, card=None, capability=None, interpret=True)


def only(facts: Facts) -> Finding:
    """The one finding of these facts."""
    found = doctor.diagnose(facts)
    assert len(found) == 1, found
    line = str(found[0])
    assert "\n" not in line
    assert found[0].cure
    return found[0]


@pytest.mark.parametrize(
    "facts",
    [
        LAPTOP,
        H200,
        RTX5060,
        replace(H200, card="RTX 4090", capability=(8, 9)),  # runs the code of sm_86
        replace(RTX5060, capability=(12, 1)),
        replace(H200, arch_list=("sm_80", "compute_80")),  # PTX is compiled for the card
        replace(H200, interpret=True, asked="1", device="cpu"),
        replace(LAPTOP, torch_cuda="13.0"),  # the default build on a machine without a card
        replace(LAPTOP, numpy="2.4.1"),  # fine from Triton 3.7 on
        replace(LAPTOP, nvidia="Tesla T4", asked="1"),  # the user chose the CPU
        replace(NO_CUDA, driver="470.82", asked="1"),
    ],
)
def test_a_working_machine_has_no_findings(facts):
    assert doctor.diagnose(facts) == []
    assert doctor.report(facts, [])[1] == 0


@pytest.mark.parametrize(
    ("facts", "what", "cure"),
    [
        (replace(LAPTOP, numpy="2.4.0", triton="3.6.0"), "NumPy 2.4.0 with Tri", "'numpy<2.4'"),
        (replace(LAPTOP, numpy="2.10.0", triton="3.6.0"), "NumPy 2.10.0 with", "'numpy<2.4'"),
        (replace(LAPTOP, numpy=None), "NumPy is not installed", "pip install"),
        (replace(LAPTOP, triton=None), "Triton is not installed", "'triton>=3.6'"),
        (replace(LAPTOP, triton=None, system="Windows"), "not installed", "'triton-windows>=3.6'"),
        (replace(LAPTOP, triton="3.5.1"), "Triton 3.5.1 is older than 3.6", "pip install -U"),
        (replace(LAPTOP, torch="2.9.1+cu124"), "older than 2.10", "torch>=2.10"),
        (replace(LAPTOP, torch=None), "PyTorch is not installed", "pip install"),
        (replace(LAPTOP, missing=("matplotlib",)), "not installed: matplotlib", "pip install"),
        (replace(LAPTOP, shadows=(("triton", "/x/triton.py"),)), "/x/triton.py hides", "rename"),
        (replace(LAPTOP, nvidia="NVIDIA H200"), "is a CPU build on a machine", "whl/cu128"),
        (replace(LAPTOP, nvidia="/dev/nvidia0 exists"), "is a CPU build", "TRITON_INTERPRET=1"),
        (replace(NO_CUDA, driver="550.54.14", driver_cuda="12.4"), "runs CUDA 12.4", "580 or"),
        (replace(NO_CUDA, driver="470.82", driver_cuda=None), "driver 470.82 is too old", "580"),
        (
            replace(
                NO_CUDA,
                nvidia=None,
                driver=None,
                driver_cuda=None,
                torch_cuda="12.8",
                cuda_error="The NVIDIA driver on your system is too old (found version 11040).",
            ),
            "runs CUDA 11.4 at most",
            "525 or newer",
        ),
        (replace(NO_CUDA, cuda_error="unknown error"), "cannot use: unknown error", "and reboot"),
        (replace(NO_CUDA, wsl=True, cuda_error="no"), "cannot use", "on Windows (never inside"),
        (replace(RTX5060, arch_list=OLD_ARCHS, torch_cuda="12.6"), "is sm_120", "R570"),
        (replace(RTX5060, driver="565.90"), "needs driver R570 or newer, got 565.90", "update"),
    ],
)
def test_a_bad_combination_is_named_with_its_cure(facts, what, cure):
    finding = only(facts)
    assert finding.broken
    assert what in finding.what
    assert cure in finding.cure
    lines, code = doctor.report(facts, [])
    assert code == 1
    assert str(finding) in lines


@pytest.mark.parametrize(
    ("facts", "what"),
    [
        (replace(LAPTOP, triton=None, system="Darwin"), "no build of it for macOS"),
        (replace(H200, numpy="2.4.0", triton="3.6.0"), "NumPy 2.4.0"),  # bad in the interpreter
        (T4, "kernels run in the CPU interpreter"),
        (replace(T4, interpret=False, asked="0"), "no tensor-core code"),
        (replace(NO_CUDA, visible_devices=""), "hides every card"),
    ],
)
def test_a_limit_of_the_machine_is_a_note(facts, what):
    finding = only(facts)
    assert not finding.broken
    assert what in finding.what
    assert doctor.report(facts, [])[1] == 0


@pytest.mark.parametrize(
    "problem",
    [
        runtime._TOO_EARLY.format("CPU interpreter"),
        runtime._NO_GPU.format("0"),
        "PyTorch does not import (libcudart.so.13: cannot open); see SETUP.md and reinstall torch",
    ],
)
def test_what_the_runtime_reports_is_broken_once(problem):
    finding = only(replace(LAPTOP, problem=problem))
    assert finding.broken
    assert f"{finding.what}; {finding.cure}" == problem


def test_facts_table_of_a_laptop_and_of_a_card():
    laptop = "\n".join(doctor.describe(replace(LAPTOP, runs_on="interpreter")))
    assert "no NVIDIA GPU" in laptop
    assert "CPU build" in laptop
    card = "\n".join(doctor.describe(H200))
    for text in ("580.65.06", "CUDA 13.0 build", "9.0", "132 multi", "232,448 bytes", "150.0 GiB"):
        assert text in card


@pytest.mark.timeout(60)
def test_self_test_for_real():
    facts = doctor.gather()
    if facts.triton is None:
        pytest.skip("no Triton here")
    results = list(doctor.self_test(facts, 50))
    assert [r for r in results if r.error] == []
    assert {r.kernel for r in results} == set(doctor.KERNELS)
    assert {r.dtype for r in results} >= {"float32", "float16"}
    unsupported = doctor._unsupported(facts, "bfloat16")
    assert ("bfloat16" in {r.dtype for r in results}) == (unsupported is None)


def child(code: str) -> tuple[str, ...]:
    prelude = "import json, os, sys, time\ndef say(**x): print(json.dumps(x), flush=True)\n"
    return (sys.executable, "-c", prelude + code)


def test_a_crash_is_a_report_and_the_rest_still_runs():
    command = child(
        "for case in sys.argv[1:]:\n"
        "    say(case=case)\n"
        "    if case == 'float32:masked load': os.abort()\n"
        "    say(case=case, error=None)\n"
    )
    results = list(doctor.self_test(LAPTOP, 20, command))
    failed = [r for r in results if r.error]
    assert [(r.dtype, r.kernel) for r in failed] == [("float32", "masked load")]
    assert "signal 6" in failed[0].error or "exit code" in failed[0].error
    assert len(results) == 2 * len(doctor.KERNELS)


def test_a_hang_is_a_report():
    results = list(doctor.self_test(LAPTOP, 0.5, child("time.sleep(60)")))
    assert "still running after 0.5 s" in results[0].error
    assert {r.skipped for r in results[1:]} == {"not run"}
    lines, code = doctor.report(LAPTOP, results)
    assert code == 1
    assert "--limit" in lines[0]


def test_a_child_that_cannot_start_is_one_finding():
    command = child("sys.exit('ImportError: libsomething.so')")
    results = list(doctor.self_test(LAPTOP, 20, command))
    lines, code = doctor.report(LAPTOP, results)
    assert code == 1
    assert len(lines) == 2
    assert "ImportError: libsomething.so" in lines[0]


@pytest.mark.parametrize(
    ("error", "text"),
    [
        ("TypeError: only 0-dimensional arrays can be converted", "numpy<2.4"),
        ("RuntimeError: Failed to find C compiler. Please specify via CC", "build-essential"),
        ("CalledProcessError (fatal error: Python.h: No such file)", "python3-dev"),
        ("AssertionError: libcuda.so cannot found!", "/usr/lib/wsl/lib"),
        ("something new", "not your code"),
    ],
)
def test_known_self_test_errors_have_their_cure(error, text):
    assert text in doctor.cure(error)


def test_equal_errors_of_the_self_test_are_one_line():
    results = [Result("float32", kernel, error="same") for kernel in doctor.KERNELS]
    lines, _ = doctor.report(LAPTOP, results)
    assert len(lines) == 2
    assert "float32 copy, float32 masked load, float32 loop, float32 dot: same" in lines[0]


def test_shadowing_files_are_found(tmp_path, monkeypatch):
    (tmp_path / "triton.py").write_text("")
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("")
    assert list(doctor._shadows()) == []
    monkeypatch.syspath_prepend(tmp_path)
    assert dict(doctor._shadows()) == {
        "torch": str(tmp_path / "torch" / "__init__.py"),
        "triton": str(tmp_path / "triton.py"),
    }


@pytest.mark.skipif(sys.platform == "win32", reason="the stand-in for nvidia-smi is a sh script")
def test_the_driver_is_read_from_nvidia_smi(tmp_path, monkeypatch):
    smi = tmp_path / "nvidia-smi"
    smi.write_text(
        "#!/bin/sh\n"
        'if [ $# -gt 0 ]; then echo "NVIDIA GeForce RTX 5060, 570.86.10"; else\n'
        'echo "| NVIDIA-SMI 570.86.10   Driver Version: 570.86.10   CUDA Version: 12.8  |"; fi\n'
    )
    smi.chmod(0o755)
    monkeypatch.setattr(doctor.shutil, "which", lambda name: str(smi))
    assert doctor._nvidia_smi() == {
        "nvidia": "NVIDIA GeForce RTX 5060",
        "card": "NVIDIA GeForce RTX 5060",
        "driver": "570.86.10",
        "driver_cuda": "12.8",
    }


def test_run_prints_the_report_and_returns_its_code(monkeypatch, capsys):
    facts = replace(LAPTOP, numpy="2.4.0", triton="3.6.0")
    monkeypatch.setattr(doctor, "gather", lambda: facts)
    monkeypatch.setattr(doctor, "self_test", lambda facts, limit: [Result("float32", "copy")])
    parser = argparse.ArgumentParser()
    doctor.add_arguments(parser)
    assert doctor.run(parser.parse_args([])) == 1
    out = capsys.readouterr().out
    assert "broken: NumPy 2.4.0 with Triton 3.6.0" in out
    assert doctor.NO_BFLOAT16 in out
    assert out.endswith("1 broken: the cure is in the line.\n")
