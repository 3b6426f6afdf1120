"""Calls of the CUDA driver as the driver sees them: cuda-bindings is the real one, and what it loads as
libcuda is a stand-in that notes its arguments. So a name, a type or a number of arguments that cuda-bindings
does not take is found without a GPU; names that launchers use are there."""

import os
import re
import subprocess
from pathlib import Path

import pytest
from command import printed
from cuda_sources import GXX, needs_gxx

#: Structs as cuda.h lays them out: CUlaunchConfig, and CUlaunchAttribute of 72 bytes.
DRIVER = r"""
#include <cstdio>
#include <cstring>
#include <string>
static std::string noted;
template <class... T> static void note(const char* format, T... values) {
  char line[512];
  snprintf(line, sizeof line, format, values...);
  noted += line;
}
struct Attribute { int id, padding; int value[16]; };
struct Config { unsigned grid[3], block[3], shared; void* stream; Attribute* attrs; unsigned num; };
static void note(const char* name, const Config* c) {
  note("%s grid %u,%u,%u block %u,%u,%u shared %u stream %d", name, c->grid[0], c->grid[1], c->grid[2],
       c->block[0], c->block[1], c->block[2], c->shared, (int)(long)c->stream);
  for (unsigned i = 0; i < c->num; ++i)
    note(" attribute %d %d", c->attrs[i].id, c->attrs[i].value[0]);
}
static int known;
#define CALL(name, ...) extern "C" int name(__VA_ARGS__)
CALL(cuModuleLoadData, void** module, const char* code) {
  *module = &known;
  note("cuModuleLoadData %s\n", code);
  return 0;
}
CALL(cuModuleGetFunction, void** function, void* module, const char* name) {
  *function = &known;
  note("cuModuleGetFunction %s %d\n", name, module == &known);
  return 0;
}
CALL(cuFuncSetAttribute, void* f, int attribute, int value) {
  note("cuFuncSetAttribute %d %d\n", attribute, value);
  return f == &known ? 0 : 1;
}
CALL(cuFuncSetCacheConfig, void* f, int config) { note("cuFuncSetCacheConfig %d\n", config); return 0; }
CALL(cuFuncGetParamInfo, void* f, size_t place, size_t* offset, size_t* size) {
  *offset = 16 * place, *size = 8;
  return place < 2 ? 0 : 1;
}
CALL(cuOccupancyMaxActiveClusters, int* count, void* f, const Config* config) {
  note("cuOccupancyMaxActiveClusters", config), note("\n");
  *count = 5;
  return 0;
}
CALL(cuLaunchKernelEx, const Config* config, void* f, void** params, void** extra) {
  note("cuLaunchKernelEx", config);
  note(" params %d %d extra %d\n", *(int*)params[0], *(int*)params[1], extra != nullptr);
  return 0;
}
CALL(cuTensorMapEncodeTiled, void* map, int kind, unsigned rank, void* address, const unsigned long* sizes,
     const unsigned long* strides, const unsigned* box, const unsigned* steps, int interleave, int swizzle,
     int promotion, int fill) {
  note("cuTensorMapEncodeTiled %d %ld", kind, (long)address);
  for (unsigned i = 0; i < rank; ++i) note(" %lu/%u/%u", sizes[i], box[i], steps[i]);
  for (unsigned i = 0; i + 1 < rank; ++i) note(" %lu", strides[i]);
  note(" %d %d %d %d\n", interleave, swizzle, promotion, fill);
  memset(map, 7, 128);
  return sizes[0] == 13;
}
CALL(other) { return 801; }
CALL(cuGetProcAddress_v2, const char* name, void** found, int, unsigned long, int* status) {
#define IS(call) if (!strcmp(name, #call)) *found = (void*)call;
  *found = (void*)other;
  IS(cuGetProcAddress_v2) IS(cuModuleLoadData) IS(cuModuleGetFunction) IS(cuFuncSetAttribute)
  IS(cuFuncSetCacheConfig) IS(cuFuncGetParamInfo) IS(cuOccupancyMaxActiveClusters) IS(cuLaunchKernelEx)
  IS(cuTensorMapEncodeTiled)
  if (!strcmp(name, "cuGetProcAddress")) *found = (void*)cuGetProcAddress_v2;
  if (status) *status = 0;
  return 0;
}
extern "C" const char* calls() { return noted.c_str(); }
"""

SCRIPT = """
import ctypes
from types import SimpleNamespace
import torch
empty = torch.empty
torch.empty = lambda *sizes, device, **options: empty(*sizes, **options)
torch.cuda.current_device = lambda: 3
torch.cuda.current_stream = lambda device: SimpleNamespace(cuda_stream={3: 4242}[device])
from torchpaged.custom_ops.cuda.loaded_kernel import Kernel
from torchpaged.custom_ops.cuda.tensor_map import tensor_map

class Params(ctypes.Structure):
    _fields_ = [("a", ctypes.c_int64), ("b", ctypes.c_int64)]

kernel = Kernel(b"code", "name", 50_000, prefer_shared=True)
assert kernel.parameters() == [(0, 8), (16, 8)]
assert kernel.resident(256, 16, 132) == 80
kernel.leave_room()
kernel.launch(7, 96, Params(3, 4), early=True, offsets=(0, 8))
kernel.launch(8, 64, Params(5, 6), early=False, offsets=(8, 0))
kernel.launch(7, 96, Params(3, 4), early=True, offsets=(0, 8))
for dtype, swizzle in ((torch.float16, 128), (torch.bfloat16, 64), (torch.float8_e5m2, 0)):
    made = tensor_map(4096, dtype, [64, 9, 11], [80, 720], [64, 2, 3], swizzle=swizzle)
    assert bytes(made) == bytes([7]) * 128
try:
    tensor_map(4096, torch.uint8, [13], [], [13], swizzle=0)
except RuntimeError as error:
    assert "cuTensorMapEncodeTiled failed" in str(error), error
else:
    raise AssertionError("an error of the driver was not raised")
library = ctypes.CDLL("libcuda.so.1")
library.calls.restype = ctypes.c_char_p
print(library.calls().decode())
"""

#: Numbers are cuda.h's: attributes 8 (shared memory), 9 (its share of the memory) and 14 (clusters over 8)
#: of a function, 6 (early) and 4 (cluster) of a launch; kinds 6, 9 and 0 and swizzles 3, 2 and 0 of a tensor
#: map.
SEEN = """\
cuModuleLoadData code
cuModuleGetFunction name 1
cuFuncSetAttribute 8 50000
cuFuncSetCacheConfig 1
cuFuncSetAttribute 14 1
cuOccupancyMaxActiveClusters grid 128,1,1 block 256,1,1 shared 50000 stream 0 attribute 4 16
cuFuncSetAttribute 9 100
cuLaunchKernelEx grid 7,1,1 block 96,1,1 shared 50000 stream 4242 attribute 6 1 params 3 4 extra 0
cuLaunchKernelEx grid 8,1,1 block 64,1,1 shared 50000 stream 4242 params 6 5 extra 0
cuLaunchKernelEx grid 7,1,1 block 96,1,1 shared 50000 stream 4242 attribute 6 1 params 3 4 extra 0
cuTensorMapEncodeTiled 6 4096 64/64/1 9/2/1 11/3/1 160 1440 0 3 2 0
cuTensorMapEncodeTiled 9 4096 64/64/1 9/2/1 11/3/1 160 1440 0 2 2 0
cuTensorMapEncodeTiled 0 4096 64/64/1 9/2/1 11/3/1 80 720 0 0 2 0
cuTensorMapEncodeTiled 0 4096 13/13/1 0 0 2 0
"""


@needs_gxx
def test_the_driver_gets_what_a_launcher_says(tmp_path: Path) -> None:
    pytest.importorskip("cuda.bindings", reason="cuda-bindings is not installed")
    source = tmp_path / "driver.cpp"
    source.write_text(DRIVER)
    library = tmp_path / "libcuda.so.1"
    subprocess.run([str(GXX), "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    found = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("LD_LIBRARY_PATH"))))
    assert printed("-c", SCRIPT, LD_LIBRARY_PATH=found).strip() == SEEN.strip()


ROOT = Path(__file__).parents[3]
NAME = re.compile(r"\b(driver|nvrtc)\.((?:cu|CU|nvrtc)\w+(?:\.[A-Z]\w+)?)")


def test_they_exist() -> None:
    pytest.importorskip("cuda.bindings", reason="cuda-bindings is not installed")
    from cuda.bindings import driver, nvrtc

    modules = {"driver": driver, "nvrtc": nvrtc}
    sources = [path.read_text() for path in (ROOT / "custom_ops").rglob("*.py")]
    used = {found for text in sources for found in NAME.findall(text)}
    assert len(used) >= 20
    for module, name in used:
        value = modules[module]
        for part in name.split("."):
            assert hasattr(value, part), f"{module}.{name}"
            value = getattr(value, part)
