"""Instructions to decode a word of eight codes on Blackwell: by bits, and by the conversion instruction. Needs no GPU.

    python fp4_conversion.py --tritons DIR:DIR:... --out results/fp4_conversion.json    # a folder per version of Triton

Counts the machine instructions of an assembled kernel with one decode, less those of a kernel that only copies. `bits`
and `conversion`: the kernels' assembly (portable.DECODE_WORD, hopper.CONVERT_WORD). `by way of float16`: without the
conversion to bfloat16, which ptxas has since CUDA 13.2. HOW_IT_WORKS.md has the summary.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "torch-ext"))
RESULT = HERE / "results" / "fp4_conversion.json"
BY_FLOAT16 = "".join(
    f"cvt.rn.f16x2.e2m1x2 ${i}, b{i}; mov.b32 {{l, u}}, ${i}; cvt.f32.f16 f, l; cvt.f32.f16 g, u; cvt.rn.bf16x2.f32 "
    f"${i}, g, f; fma.rn.bf16x2 ${i}, ${i}, s2, nz;"
    for i in range(4)
)
FLOAT16 = (
    "{ .reg .b8 b0, b1, b2, b3; .reg .b16 l, u; .reg .f32 f, g; .reg .b32 s2, nz; mov.b32 nz, 0x80008000; mov.b32 s2, "
    "{$5, $5}; "
    f"mov.b32 {{b0, b1, b2, b3}}, $4; {BY_FLOAT16} }}"
)
MOVE = "mov.b32 $0, $4; mov.b32 $1, $4; mov.b32 $2, $4; mov.b32 $3, $4;"


def ptx(asm: str, sm: int, version: str) -> str:
    """A kernel in which every thread decodes a word."""
    for name, register in {f"${i}": f"h{i}" for i in range(4)}.items():
        asm = asm.replace(name, register)
    return f""".version {version}
.target sm_{sm}a
.address_size 64
.visible .entry k(.param .u64 p, .param .u64 q) {{
.reg .b64 a, b; .reg .b32 w, v, h0, h1, h2, h3, i; .reg .b16 s;
ld.param.u64 a, [p]; ld.param.u64 b, [q]; mov.u32 i, %tid.x; mad.wide.u32 a, i, 8, a; mad.wide.u32 b, i, 16, b;
ld.global.v2.b32 {{w, v}}, [a]; cvt.u16.u32 s, v;
{asm.replace("$4", "w").replace("$5", "s")}
st.global.v4.b32 [b], {{h0, h1, h2, h3}}; ret; }}"""


def counted(asm: str, sm: int, tools: Path) -> list[str] | None:
    """Machine instructions, or None if the assembler lacks one."""
    with tempfile.TemporaryDirectory() as folder:
        source, cubin = Path(folder) / "k.ptx", Path(folder) / "k.cubin"
        for version in ("9.2", "9.1", "9.0", "8.8", "8.7"):  # the newest version of the assembler
            source.write_text(ptx(asm, sm, version))
            done = subprocess.run(
                [tools / "ptxas-blackwell", f"-arch=sm_{sm}a", source, "-o", cubin], capture_output=True, check=False
            )
            if done.returncode == 0:
                listed = subprocess.run([tools / "nvdisasm", "-c", cubin], capture_output=True, text=True, check=True)
                found = re.findall(
                    r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\d+ )?([A-Z][\w.]*)", listed.stdout, re.MULTILINE
                )
                return [name for name in found if not re.search("NOP|BRA|MOV", name)]  # the copy kernel needs moves
    return None


def measure(folders: list[Path]) -> list[dict]:
    from qerl_nvfp4.hopper import CONVERT_WORD
    from qerl_nvfp4.portable import DECODE_WORD

    rows = []
    for folder in folders:
        tools = folder / "triton" / "backends" / "nvidia" / "bin"
        said = subprocess.run([tools / "ptxas-blackwell", "--version"], capture_output=True, text=True, check=True)
        for sm in (100, 120):
            row = {
                "triton": re.search(r'__version__ = ["\'](.*?)["\']', (folder / "triton/__init__.py").read_text())[1],
                "ptxas": re.search(r"release ([\d.]+)", said.stdout)[1],
                "sm": sm,
            }
            bare = counted(MOVE, sm, tools)
            for name, asm in (
                ("bits", DECODE_WORD.value),
                ("conversion", CONVERT_WORD.value),
                ("by way of float16", FLOAT16),
            ):
                found = counted(asm, sm, tools)
                row[name] = found and len(found) - len(bare)
            rows.append(row)
            print(row, flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tritons", required=True, help="folders with a Triton each, separated like PATH")
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    from qerl_nvfp4.measured import source_digest

    record = {"command": "fp4_conversion.py --tritons <one folder per version>", "kernels": source_digest()}
    record["rows"] = measure([Path(folder) for folder in options.tritons.split(":")])
    options.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
