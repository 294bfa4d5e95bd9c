# Pinion for CMake: find_package(Pinion REQUIRED COMPONENTS hooks emulated)
#
#   Pinion::allocator   the allocator alone; needs Abseil
#   Pinion::engine      the allocator, engine and CUDA device; also needs CUDA 13's runtime
#   Pinion::hooks       the engine, and the hooks for LibTorch programs; also needs LibTorch
#   Pinion::emulated    the hooks, and the emulated device
#   Pinion::pinion      the library without the emulated device
#   Pinion::cuda        the same for programs on CUDA; also needs LibTorch's libtorch_cuda
#
# Without COMPONENTS: all installed parts. The variables CUDA_PATH and TORCH_PATH, or those of the
# environment, locate CUDA and LibTorch: -DTORCH_PATH=.../site-packages/torch. Default of CUDA_PATH:
# pip's runtime beside torch, else /usr/local/cuda. LibTorch's own find_package(Torch) fails without
# a CUDA compiler, so it is not called here. A program that calls it first needs no TORCH_PATH.

get_filename_component(_pinion_prefix "${CMAKE_CURRENT_LIST_DIR}/../../.." ABSOLUTE)

# Ends this file. find_package prints the reason.
macro(_pinion_missing)
  set(Pinion_FOUND FALSE)
  string(CONCAT Pinion_NOT_FOUND_MESSAGE ${ARGN})
  return()
endmacro()

macro(_pinion_require part)
  if(NOT EXISTS "${_pinion_prefix}/lib/libpinion_${part}.a")
    _pinion_missing("${_pinion_prefix}/lib has no libpinion_${part}.a: run "
      "./bazelw run --config=opt //tools/install:${part} -- ${_pinion_prefix}")
  endif()
endmacro()

macro(_pinion_archive part)
  _pinion_require(${part})
  if(NOT TARGET Pinion::${part})
    add_library(Pinion::${part} STATIC IMPORTED)
    set_target_properties(Pinion::${part} PROPERTIES
      IMPORTED_LOCATION "${_pinion_prefix}/lib/libpinion_${part}.a"
      INTERFACE_COMPILE_FEATURES cxx_std_20
      INTERFACE_INCLUDE_DIRECTORIES "${_pinion_prefix}/include"
      INTERFACE_LINK_LIBRARIES "${ARGN}")
  endif()
endmacro()

# Each part needs the parts before it.
set(_pinion_parts allocator engine hooks emulated)
set(_pinion_last -1)
if(cuda IN_LIST Pinion_FIND_COMPONENTS)
  list(APPEND Pinion_FIND_COMPONENTS hooks)
endif()
foreach(_pinion_part ${_pinion_parts})
  list(FIND _pinion_parts ${_pinion_part} _pinion_index)
  if(_pinion_part IN_LIST Pinion_FIND_COMPONENTS OR
     (NOT Pinion_FIND_COMPONENTS AND EXISTS "${_pinion_prefix}/lib/libpinion_${_pinion_part}.a"))
    set(_pinion_last ${_pinion_index})
  endif()
endforeach()
foreach(_pinion_part ${Pinion_FIND_COMPONENTS})
  if(NOT _pinion_part IN_LIST _pinion_parts AND NOT _pinion_part STREQUAL cuda)
    list(JOIN _pinion_parts ", " _pinion_parts)
    _pinion_missing("Pinion has no component ${_pinion_part}: it has ${_pinion_parts}, cuda")
  endif()
endforeach()

# Abseil's symbols contain the release: another release does not link.
find_package(absl 20220623 QUIET)
find_package(Threads QUIET)
if(NOT absl_FOUND OR NOT Threads_FOUND)
  _pinion_missing("Pinion needs Abseil 20220623: on Debian 12, apt-get install libabsl-dev")
endif()
_pinion_archive(allocator
  absl::btree absl::cleanup absl::core_headers absl::flat_hash_map absl::flat_hash_set absl::function_ref
  absl::inlined_vector absl::span absl::status absl::statusor absl::str_format absl::strings
  absl::time Threads::Threads)
if(_pinion_last LESS 1)
  return()
endif()

foreach(_pinion_path CUDA_PATH TORCH_PATH)
  set(_pinion_${_pinion_path} "${${_pinion_path}}")
  if(NOT _pinion_${_pinion_path})
    set(_pinion_${_pinion_path} "$ENV{${_pinion_path}}")
  endif()
endforeach()
if(NOT _pinion_TORCH_PATH)
  set(_pinion_TORCH_PATH "${TORCH_INSTALL_PREFIX}")
endif()

if(NOT _pinion_CUDA_PATH)
  set(_pinion_CUDA_PATH
    "${_pinion_TORCH_PATH}/../nvidia/cu13" /usr/local/cuda /usr/local/cuda-13 /usr/local/cuda-13.0)
endif()
find_library(PINION_CUDART libcudart.so.13
  PATHS ${_pinion_CUDA_PATH} PATH_SUFFIXES lib64 lib NO_DEFAULT_PATH)
# The runtime's headers include the compiler's, which are in another package. Headers of another
# CUDA release declare another runtime.
foreach(_pinion_root ${_pinion_CUDA_PATH})
  set(_pinion_header "${_pinion_root}/include/cuda_runtime_api.h")
  if(EXISTS "${_pinion_root}/include/crt/host_defines.h" AND EXISTS "${_pinion_header}")
    file(STRINGS "${_pinion_header}" _pinion_is_13 REGEX "define CUDART_VERSION  13" LIMIT_COUNT 1)
    if(_pinion_is_13)
      find_path(PINION_CUDA_INCLUDE crt/host_defines.h PATHS "${_pinion_root}/include" NO_DEFAULT_PATH)
    endif()
  endif()
endforeach()
if(NOT PINION_CUDART OR NOT PINION_CUDA_INCLUDE)
  list(JOIN _pinion_CUDA_PATH ", " _pinion_CUDA_PATH)
  _pinion_missing("Pinion's engine needs CUDA 13's runtime, and there is no libcudart.so.13 with "
    "CUDA 13's headers and crt/host_defines.h in ${_pinion_CUDA_PATH}. Set CUDA_PATH to a toolkit, or to the folder "
    "nvidia/cu13 that pip install nvidia-cuda-runtime==13.0.96 nvidia-cuda-crt==13.0.88 makes")
endif()
mark_as_advanced(PINION_CUDART PINION_CUDA_INCLUDE)
if(NOT TARGET Pinion::cudart)
  add_library(Pinion::cudart SHARED IMPORTED)
  set_target_properties(Pinion::cudart PROPERTIES
    IMPORTED_LOCATION "${PINION_CUDART}"
    INTERFACE_INCLUDE_DIRECTORIES "${PINION_CUDA_INCLUDE}")
endif()
_pinion_archive(engine Pinion::allocator Pinion::cudart ${CMAKE_DL_LIBS})
if(_pinion_last LESS 2)
  return()
endif()

_pinion_require(hooks)
file(STRINGS "${CMAKE_CURRENT_LIST_DIR}/libtorch_release" _pinion_release)  # "2.11"
if(NOT EXISTS "${_pinion_TORCH_PATH}/lib/libtorch_cpu.so")
  _pinion_missing("Pinion's hooks need LibTorch ${_pinion_release}, and TORCH_PATH ('${_pinion_TORCH_PATH}') "
    "has no lib/libtorch_cpu.so: after pip install torch==${_pinion_release}.* set it to .../site-packages/torch")
endif()
# The wheel has its version in the first file, LibTorch's archive in the second.
foreach(_pinion_file version.py build-version)
  if(EXISTS "${_pinion_TORCH_PATH}/${_pinion_file}")
    file(STRINGS "${_pinion_TORCH_PATH}/${_pinion_file}" _pinion_version
      REGEX "[0-9]+\\.[0-9]+\\.[0-9]+" LIMIT_COUNT 1)
    if(NOT _pinion_version MATCHES "(^|[^0-9.])${_pinion_release}\\.")
      _pinion_missing("Pinion's hooks need LibTorch ${_pinion_release}, and TORCH_PATH (${_pinion_TORCH_PATH}) "
        "has: ${_pinion_version}")
    endif()
    break()
  endif()
endforeach()
if(NOT TARGET Pinion::torch_cpu)
  foreach(_pinion_library c10 torch_cpu)
    add_library(Pinion::${_pinion_library} SHARED IMPORTED)
    set_target_properties(Pinion::${_pinion_library} PROPERTIES
      IMPORTED_LOCATION "${_pinion_TORCH_PATH}/lib/lib${_pinion_library}.so")
  endforeach()
  set_target_properties(Pinion::torch_cpu PROPERTIES
    INTERFACE_INCLUDE_DIRECTORIES
      "${_pinion_TORCH_PATH}/include;${_pinion_TORCH_PATH}/include/torch/csrc/api/include"
    INTERFACE_LINK_LIBRARIES Pinion::c10)
endif()
_pinion_archive(hooks Pinion::engine Pinion::torch_cpu)
if(NOT TARGET Pinion::pinion)
  add_library(Pinion::pinion INTERFACE IMPORTED)
  set_target_properties(Pinion::pinion PROPERTIES INTERFACE_LINK_LIBRARIES Pinion::hooks)
endif()
# No program names a symbol of libtorch_cuda, which registers itself: the linker must not drop it.
set(_pinion_torch_cuda "${_pinion_TORCH_PATH}/lib/libtorch_cuda.so")
if(EXISTS "${_pinion_torch_cuda}" AND NOT TARGET Pinion::cuda)
  add_library(Pinion::cuda INTERFACE IMPORTED)
  set_target_properties(Pinion::cuda PROPERTIES INTERFACE_LINK_LIBRARIES
    "Pinion::pinion;-Wl,--push-state,--no-as-needed,${_pinion_torch_cuda},--pop-state")
elseif(cuda IN_LIST Pinion_FIND_COMPONENTS AND NOT TARGET Pinion::cuda)
  _pinion_missing("Pinion::cuda needs a LibTorch for CUDA, and TORCH_PATH (${_pinion_TORCH_PATH}) "
    "has no lib/libtorch_cuda.so: pip install torch==${_pinion_release}.* brings it")
endif()
if(_pinion_last LESS 3)
  return()
endif()

_pinion_archive(emulated Pinion::hooks)
