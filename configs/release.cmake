# cmake -C configs/release.cmake -B build -G Ninja
set(CMAKE_BUILD_TYPE Release CACHE STRING "")
