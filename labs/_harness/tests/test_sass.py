"""sass.lost_operands, on hand-made listings and on what the assembler makes of lab 07."""

import pytest

from labs import _impl
from labs._harness import compiler, runtime, xray
from labs._harness.cards import LOST, state
from labs._harness.sass import lost_operands

LAB = "07_attention_backward"
needs_compiler = pytest.mark.skipif(
    compiler.unavailable() is not None, reason=str(compiler.unavailable())
)


def listing(*instructions: str) -> str:
    """As cuobjdump prints it: 16 bytes an instruction, its code behind it."""
    lines = [
        f"        /*{16 * n:04x}*/                   {code} ;      /* 0x0 */\n{' ' * 60}/* 0x1 */"
        for n, code in enumerate(instructions)
    ]
    return "\n".join(['\t.headerflags @"EF_CUDA_SM90"', *lines])


MADE = "F2FP.BF16.F32.PACK_AB R56, R25, R24"
PRODUCT = "HGMMA.64x64x16.F32.BF16 R24, R56, gdesc[UR4], RZ, !UPT"
AGAIN = "@!P1 BRA 0x10"


@pytest.mark.parametrize(
    "inside",
    [
        "F2FP.BF16.F32.PACK_AB R57, R43, R42",
        "LDS.128 R54, [R3+0x10]",
        "IMAD.WIDE R58, R2, 0x4, R6",
        "HGMMA.64x64x16.F32.BF16 R40, gdesc[UR8], RZ, !UPT",
    ],
)
def test_an_operand_that_is_overwritten_behind_the_product_is_lost(inside):
    assert lost_operands(listing(MADE, PRODUCT, inside, AGAIN)) == [PRODUCT]
    assert lost_operands(listing(MADE, inside, PRODUCT, AGAIN)) == []  # made anew in each turn
    assert lost_operands(listing(MADE, PRODUCT, AGAIN, inside)) == []  # after the loop


def test_an_operand_of_the_next_turn_is_not_lost():
    """The weights of one block meet their values in the next turn of the loop."""
    made = [f"F2FP.BF16.F32.PACK_AB R{n}, R{2 * n + 1}, R{2 * n}" for n in range(56, 60)]
    assert lost_operands(listing(MADE, PRODUCT, *made, AGAIN)) == []
    assert lost_operands(listing(MADE, PRODUCT, *made[:3], AGAIN)) == [PRODUCT]
    first = listing(MADE, "MOV R59, R12", PRODUCT, *made[:3], AGAIN)  # one comes by way of another
    assert lost_operands(first) == []


def test_code_that_was_moved_out_of_the_way_makes_no_loop():
    """An mbarrier's wait, at 0x20 and again at 0x60, from where it goes back to 0x40."""
    waits = "SYNCS.PHASECHK.TRANS64.TRYWAIT P2, [UR22], R5"
    after = listing(MADE, PRODUCT, waits, "@!P2 BRA 0x60", MADE, "EXIT", waits, "BRA 0x40")
    assert lost_operands(after) == []
    loop = listing(MADE, PRODUCT, waits, "@!P2 BRA 0x70", "MOV R56, R1", AGAIN, "EXIT", "BRA 0x40")
    assert lost_operands(loop) == [PRODUCT]


@pytest.mark.parametrize(
    "reader",
    [
        "STS.128 [R3], R56",
        "FADD R10, R58, R59",
        "LDG.E R10, desc[UR4][R58.64]",
        "HGMMA.64x64x16.F32.BF16 R88, R56, gdesc[UR8], R88",
        "HGMMA.64x64x16.F32.BF16 R48, gdesc[UR8], R48",
    ],
)
def test_an_operand_whose_registers_serve_another_purpose_is_lost(reader):
    made = [f"F2FP.BF16.F32.PACK_AB R{n}, R{2 * n + 1}, R{2 * n}" for n in range(56, 60)]
    assert PRODUCT in lost_operands(listing(MADE, PRODUCT, *made, reader, AGAIN))


@pytest.mark.parametrize(
    "inside",
    [
        "STS.128 [R3], R56",
        "F2FP.BF16.F32.PACK_AB R60, R57, R56",
        "LDGSTS.E.BYPASS.128 [R56], desc[UR20][R34.64]",
        "HGMMA.64x64x16.F32.BF16 R64, gdesc[UR8], RZ, !UPT",
    ],
)
def test_what_reads_an_operand_or_writes_beside_it_leaves_it(inside):
    assert lost_operands(listing(MADE, PRODUCT, inside, AGAIN)) == []


def test_operands_in_shared_memory_have_no_registers():
    product = "HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4], RZ, !UPT"
    assert lost_operands(listing(MADE, product, "MOV R56, R1", AGAIN)) == []


@needs_compiler
@pytest.mark.timeout(180)
def test_the_assembler_loses_what_lab_07_refuses(tmp_path):
    text = (_impl.LABS / LAB / "solution.py").read_text()
    assert text.count("if registers and causal:") == 1
    file = tmp_path / "student.py"
    file.write_text(text.replace("if registers and causal:", "if False:"))
    found = xray.XRay(LAB, str(file), cache=None)
    units = {
        (launcher, causal): found.unit(launcher, "sm_90", causal=causal, registers=True)
        for launcher in ("attention_dkdv", "attention_dq")
        for causal in (True, False)
    }
    found.compile(list(units.values()))
    lost = {key: [state(c) == LOST for c in found.of(unit)] for key, unit in units.items()}
    causal = lost.pop(("attention_dkdv", True))
    assert lost == dict.fromkeys(lost, [False])
    if not runtime.setup().triton_version.startswith(("3.6", "3.7")):
        pytest.skip(f"not the ptxas of Triton 3.6 and 3.7; it loses the operand: {causal}")
    assert causal == [True]
