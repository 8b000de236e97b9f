package evernear;

import java.util.concurrent.Semaphore;

/** Limits per client and for all clients together. evernear.serving.configuration computes the values. */
final class Limits {
    /** Seconds for the head of a request, from the start of the connection or the previous response. */
    static final int IDLE_S = Integer.getInteger("evernear.idle_timeout_s");

    /** Seconds for the body of a request, from its head. */
    static final int UPLOAD_S = Integer.getInteger("evernear.upload_timeout_s");

    /** Seconds for the response, from the end of the request. */
    static final int RESPONSE_S = Integer.getInteger("evernear.answer_timeout_s");

    /** Connections of the inference API. */
    static final int CONNECTIONS = Integer.getInteger("evernear.max_connections");

    /** Connections of each other API. */
    static final int OTHER_CONNECTIONS = 64;

    /** Bytes of all in-flight requests, over REST and gRPC. */
    static final Semaphore IN_FLIGHT_BYTES = new Semaphore(Integer.getInteger("evernear.max_in_flight_bytes"));

    static final String EXCEEDED = "The requests in flight have reached the server's limit in bytes; try again.";

    private Limits() {}
}
