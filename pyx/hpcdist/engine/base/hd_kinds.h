/* What an operation is to the engine: a row each, with its name in reports and recordings. */
#ifndef HD_KINDS_H
#define HD_KINDS_H

#define HD_KINDS(X)                                                                                \
    X(BARRIER, "barrier")                                                                          \
    X(ALL_REDUCE, "all_reduce")                                                                    \
    X(REDUCE, "reduce")                                                                            \
    X(REDUCE_SCATTER, "reduce_scatter")                                                            \
    X(BROADCAST, "broadcast")                                                                      \
    X(ALL_GATHER, "all_gather")                                                                    \
    X(GATHER, "gather")                                                                            \
    X(SCATTER, "scatter")                                                                          \
    X(ALL_TO_ALL, "all_to_all")                                                                    \
    X(SEND, "send") /* from here on: messages */                                                   \
    X(RECV, "recv")

enum hd_kind {
#define X(NAME, text) HD_##NAME,
    HD_KINDS(X)
#undef X
        HD_KIND_COUNT
};

#endif
