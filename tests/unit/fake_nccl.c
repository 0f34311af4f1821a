/* Stands in for libnccl.so.2: a rank that sends to itself in host memory, a log of calls in FAKE_NCCL_LOG, and faults:
   FAKE_NCCL_STATE is what ncclCommGetAsyncError reports after the first exchange, FAKE_NCCL_INIT before it, and
   FAKE_NCCL_FAIL names a function that fails. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct { char bytes[128]; } Id;
typedef struct { size_t size; unsigned magic, version; int blocking; } Config;

static int sends, receives, exchanged;
static const void* from[8];
static void* to[8];
static size_t bytes[8];

static int number(const char* name) {
    const char* value = getenv(name);
    return value ? atoi(value) : 0;
}

static int call(const char* name, const char* what, long a, long b) {
    const char* path = getenv("FAKE_NCCL_LOG");
    FILE* log = path ? fopen(path, "a") : NULL;
    if (log) {
        fprintf(log, "%s%s", name, what);
        if (a >= 0) fprintf(log, " %ld", a);
        if (b >= 0) fprintf(log, " %ld", b);
        fprintf(log, "\n");
        fclose(log);
    }
    const char* failing = getenv("FAKE_NCCL_FAIL");
    return failing && strcmp(failing, name) == 0 ? 5 : 0;
}

int ncclGetVersion(int* version) { *version = 22800; return call("version", "", -1, -1); }
int ncclGetUniqueId(Id* id) { memset(id, 42, sizeof *id); return call("id", "", -1, -1); }
int ncclCommInitRankConfig(void** comm, int world, Id id, int rank, Config* config) {
    *comm = &sends;
    if (id.bytes[127] != 42 || config->magic != 0xcafebeef || config->blocking != 0 || config->size != 24) return 4;
    int failed = call("init", "", world, rank);
    return failed ? failed : 7;
}
int ncclGroupStart(void) { sends = receives = 0; return call("start", "", -1, -1); }
int ncclSend(const void* data, size_t count, int type, int peer, void* comm, void* stream) {
    if (type != 1 || comm != (void*)&sends || stream != (void*)7) return 4;
    from[sends] = data, bytes[sends++] = count;
    return call("send", "", peer, (long)count);
}
int ncclRecv(void* data, size_t count, int type, int peer, void* comm, void* stream) {
    if (type != 1 || comm != (void*)&sends || stream != (void*)7) return 4;
    to[receives++] = data;
    return call("recv", "", peer, (long)count);
}
int ncclGroupEnd(void) {
    for (int i = 0; i < sends && i < receives; ++i) memcpy(to[i], from[i], bytes[i]);
    exchanged = 1;
    return call("end", "", -1, -1);
}
int ncclCommGetAsyncError(void* comm, int* state) {
    *state = exchanged ? number("FAKE_NCCL_STATE") : number("FAKE_NCCL_INIT");
    return comm == (void*)&sends ? 0 : 4;
}
int ncclCommAbort(void* comm) { return comm ? call("abort", "", -1, -1) : 4; }
int ncclCommDestroy(void* comm) { return comm ? call("destroy", "", -1, -1) : 4; }
const char* ncclGetErrorString(int code) { return code == 6 ? "remote process exited" : "invalid usage"; }
