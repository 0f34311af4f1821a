/* A disk that is slow and a clock that jumps, for every process that loads this (LD_PRELOAD). The file that CHAOS_SHIM names holds two
   int64: seconds added to CLOCK_REALTIME, and microseconds that each fsync takes longer. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const volatile int64_t nothing[2];
static const volatile int64_t* control = nothing;

__attribute__((constructor)) static void map_control(void) {
  const char* path = getenv("CHAOS_SHIM");
  int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
  if (file < 0) return;
  void* at = mmap(NULL, sizeof nothing, PROT_READ, MAP_SHARED, file, 0);
  if (at != MAP_FAILED) control = at;
  close(file);
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

int clock_gettime(clockid_t clock, struct timespec* now) {
  static __typeof__(&clock_gettime) real;
  if (!real) real = REAL(clock_gettime);
  int status = real(clock, now);
  if (status == 0 && clock == CLOCK_REALTIME) now->tv_sec += control[0];
  return status;
}

int gettimeofday(struct timeval* restrict now, void* restrict zone) {
  static __typeof__(&gettimeofday) real;
  if (!real) real = REAL(gettimeofday);
  int status = real(now, zone);
  if (status == 0) now->tv_sec += control[0];
  return status;
}

time_t time(time_t* at) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  if (at) *at = now.tv_sec;
  return now.tv_sec;
}

static void wait_for_disk(void) {
  struct timespec left = {control[1] / 1000000, control[1] % 1000000 * 1000};
  if (control[1] > 0) nanosleep(&left, NULL);
}

int fsync(int file) {
  static __typeof__(&fsync) real;
  if (!real) real = REAL(fsync);
  wait_for_disk();
  return real(file);
}

int fdatasync(int file) {
  static __typeof__(&fdatasync) real;
  if (!real) real = REAL(fdatasync);
  wait_for_disk();
  return real(file);
}
