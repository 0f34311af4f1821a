/* Stands in for libnccl.so.2 in host memory, with a log of calls in FAKE_NCCL_LOG, and faults: FAKE_NCCL_STATE is what
   ncclCommGetAsyncError reports after the first exchange, FAKE_NCCL_INIT before it, FAKE_NCCL_FAIL names a function that
   fails, and FAKE_NCCL_VERSION is the version (22800).

   The n-th message received is the n-th sent of the same group. With FAKE_NCCL_MAIL, ranks are threads of one process that
   exchange messages: a communicator is in progress until all its ranks have joined and all it awaits has come.

   A rank hands over memory in the form that NCCL_CUMEM_ENABLE says when it joins, 1 by default. Ranks of both forms join all
   the same, and fail with their first messages, as NCCL 2.30 on one machine. */
#include <limits.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOST = 256 };
typedef struct { char bytes[128]; } Id;
typedef struct { size_t size; unsigned magic, version; int blocking, cga, min_ctas, max_ctas; const char* net; } Config;
typedef struct { void* data; size_t bytes; int peer; } Message;
typedef struct { Id id; int rank, world, exchanged, awaited; Message await[MOST]; } Comm;
typedef struct { Id id; int source, destination; size_t bytes; char* data; } Letter;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static Letter letters[4096];
static int posted, ids;
typedef struct { Id id; int joined, forms; } Meeting;
static Meeting meetings[MOST];
static __thread Message sends[MOST], receives[MOST];
static __thread int sent, received;
static __thread Comm* used;

static int number(const char* name, int otherwise) {
    const char* value = getenv(name);
    return value ? atoi(value) : otherwise;
}

static int call(const char* name, const char* what, long a, long b) {
    const char* path = getenv("FAKE_NCCL_LOG");
    FILE* log = path ? fopen(path, "a") : NULL;
    if (log) {
        char line[128];
        int n = snprintf(line, sizeof line, "%s%s", name, what);
        if (a >= 0) n += snprintf(line + n, sizeof line - n, " %ld", a);
        if (b >= 0) n += snprintf(line + n, sizeof line - n, " %ld", b);
        fprintf(log, "%s\n", line);
        fclose(log);
    }
    const char* failing = getenv("FAKE_NCCL_FAIL");
    return failing && strcmp(failing, name) == 0 ? 5 : 0;
}

static Meeting* meeting(const Id* id) {
    int i = 0;
    while (meetings[i].joined && memcmp(&meetings[i].id, id, sizeof *id) != 0) ++i;
    meetings[i].id = *id;
    return &meetings[i];
}

/* Whether a message for this rank has come; then it is taken. */
static int take(Comm* comm, const Message* wanted) {
    for (int i = 0; i < posted; ++i) {
        Letter* letter = &letters[i];
        if (!letter->data || letter->source != wanted->peer || letter->destination != comm->rank) continue;
        if (memcmp(&letter->id, &comm->id, sizeof comm->id) != 0) continue;
        memcpy(wanted->data, letter->data, wanted->bytes);
        free(letter->data);
        letter->data = NULL;
        return 1;
    }
    return 0;
}

int ncclGetVersion(int* version) { *version = number("FAKE_NCCL_VERSION", 22800); return 0; }
int ncclGetUniqueId(Id* id) {
    memset(id, 42, sizeof *id);
    pthread_mutex_lock(&lock);
    id->bytes[0] = (char)++ids;
    pthread_mutex_unlock(&lock);
    return call("id", "", -1, -1);
}
int ncclCommInitRankConfig(Comm** comm, int world, Id id, int rank, Config* config) {
    int ctas = number("FAKE_NCCL_VERSION", 22800) >= 21700;
    if (id.bytes[127] != 42 || config->magic != 0xcafebeef || config->blocking != 0) return 4;
    if (config->size != (ctas ? 40 : 24) || config->version != (ctas ? 21700 : 21400)) return 4;
    if (ctas && (config->cga != INT_MIN || config->min_ctas != INT_MIN || config->net)) return 4;
    *comm = calloc(1, sizeof **comm);
    (*comm)->id = id, (*comm)->rank = rank, (*comm)->world = world;
    pthread_mutex_lock(&lock);
    meeting(&id)->forms |= 1 << number("NCCL_CUMEM_ENABLE", 1);
    ++meeting(&id)->joined;
    pthread_mutex_unlock(&lock);
    if (ctas && config->max_ctas != INT_MIN) call("ctas", "", config->max_ctas, -1);
    int failed = call("init", "", world, rank);
    return failed ? failed : 7;
}
int ncclGroupStart(void) { sent = received = 0; return call("start", "", -1, -1); }
int ncclSend(const void* data, size_t count, int type, int peer, Comm* comm, void* stream) {
    if (type != 1 || stream != (void*)7 || sent == MOST) return 4;
    used = comm;
    sends[sent++] = (Message){(void*)data, count, peer};
    return call("send", "", peer, (long)count);
}
int ncclRecv(void* data, size_t count, int type, int peer, Comm* comm, void* stream) {
    if (type != 1 || stream != (void*)7 || received == MOST) return 4;
    used = comm;
    receives[received++] = (Message){data, count, peer};
    return call("recv", "", peer, (long)count);
}
int ncclGroupEnd(void) {
    pthread_mutex_lock(&lock);
    if (getenv("FAKE_NCCL_MAIL")) {
        for (int i = 0; i < sent; ++i) {
            char* copy = malloc(sends[i].bytes);
            memcpy(copy, sends[i].data, sends[i].bytes);
            letters[posted++ % 4096] = (Letter){used->id, used->rank, sends[i].peer, sends[i].bytes, copy};
        }
        for (int i = 0; i < received; ++i) used->await[used->awaited++] = receives[i];
    } else {
        for (int i = 0; i < sent && i < received; ++i) memcpy(receives[i].data, sends[i].data, sends[i].bytes);
    }
    if (used) used->exchanged = 1;
    pthread_mutex_unlock(&lock);
    return call("end", "", -1, -1);
}
int ncclCommGetAsyncError(Comm* comm, int* state) {
    *state = comm->exchanged ? number("FAKE_NCCL_STATE", 0) : number("FAKE_NCCL_INIT", 0);
    if (comm->exchanged && meeting(&comm->id)->forms == 3) *state = 1;
    if (*state == 1 || !getenv("FAKE_NCCL_MAIL")) return 0;
    pthread_mutex_lock(&lock);
    if (meeting(&comm->id)->joined < comm->world) *state = 7;
    int left = 0;
    for (int i = 0; i < comm->awaited; ++i)
        if (!take(comm, &comm->await[i])) comm->await[left++] = comm->await[i];
    comm->awaited = left;
    if (left) *state = 7;
    pthread_mutex_unlock(&lock);
    return 0;
}
int ncclCommAbort(Comm* comm) { return comm ? call("abort", "", -1, -1) : 4; }
int ncclCommDestroy(Comm* comm) { return comm ? call("destroy", "", -1, -1) : 4; }
const char* ncclGetErrorString(int code) { return code == 6 ? "remote process exited" : code == 1 ? "unhandled cuda error" : "invalid usage"; }
