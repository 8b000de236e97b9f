package evernear;

import java.util.concurrent.Semaphore;

/** What one client, or all together, may take; evernear.serving.java has the numbers. */
final class Limits {
    /** Seconds until the head of a request is here, from the connection's beginning or the last answer. */
    static final int IDLE_S = Integer.getInteger("evernear.idle_timeout_s");

    /** Seconds from a request's head to the end of its body. */
    static final int UPLOAD_S = Integer.getInteger("evernear.upload_timeout_s");

    /** Seconds from a request's end to its answer. */
    static final int ANSWER_S = Integer.getInteger("evernear.answer_timeout_s");

    /** Connections of the inference API. */
    static final int CONNECTIONS = Integer.getInteger("evernear.max_connections");

    /** Connections of each other API. */
    static final int OTHER_CONNECTIONS = 64;

    /** Bytes of all requests that are being received or answered, REST's and gRPC's. */
    static final Semaphore IN_FLIGHT_BYTES = new Semaphore(Integer.getInteger("evernear.max_in_flight_bytes"));

    static final String EXCEEDED = "The server holds as many bytes of requests as it may; try again.";

    private Limits() {}
}
