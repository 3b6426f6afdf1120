# TORCHPAGED_SOURCES: what the native library is built from. TORCHPAGED_DIGEST: a digest of their names and
# contents, as custom_ops/native.py makes it. As a script (cmake -P) it prints the digest.
get_filename_component(root "${CMAKE_CURRENT_LIST_DIR}/../.." ABSOLUTE)
file(GLOB TORCHPAGED_SOURCES RELATIVE "${root}"
  "${root}/CMakeLists.txt" "${root}/custom_ops/cpu/*" "${root}/custom_ops/*/cpu/*")
list(FILTER TORCHPAGED_SOURCES INCLUDE REGEX "\\.(h|cpp|cmake|txt)$")
list(SORT TORCHPAGED_SOURCES)
set(lines "")
foreach(name IN LISTS TORCHPAGED_SOURCES)
  file(SHA256 "${root}/${name}" digest)
  string(APPEND lines "${name} ${digest}\n")
endforeach()
string(SHA256 TORCHPAGED_DIGEST "${lines}")
if(CMAKE_SCRIPT_MODE_FILE)
  message("${TORCHPAGED_DIGEST}")
endif()
