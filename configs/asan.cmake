# cmake -C configs/asan.cmake -B build-asan -G Ninja
# AddressSanitizer and UndefinedBehaviorSanitizer; the first finding ends the program.
set(CMAKE_BUILD_TYPE Debug CACHE STRING "")
set(flags "-O1 -g1 -fno-omit-frame-pointer -fsanitize=address,undefined,float-cast-overflow -fno-sanitize-recover=all")
set(CMAKE_C_FLAGS_DEBUG "${flags}" CACHE STRING "")
set(CMAKE_CXX_FLAGS_DEBUG "${flags}" CACHE STRING "")
set(CG_CUDA OFF CACHE BOOL "")
