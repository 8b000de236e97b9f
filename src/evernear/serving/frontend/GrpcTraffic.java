package evernear;

import io.grpc.ForwardingServerCall.SimpleForwardingServerCall;
import io.grpc.ForwardingServerCallListener.SimpleForwardingServerCallListener;
import io.grpc.Metadata;
import io.grpc.ServerCall;
import io.grpc.ServerCallHandler;
import io.grpc.ServerInterceptor;
import io.grpc.Status;
import com.google.protobuf.MessageLite;
import io.netty.util.concurrent.GlobalEventExecutor;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicInteger;

/** Limits the bytes of in-flight gRPC calls, and records successful predictions. */
final class GrpcTraffic implements ServerInterceptor {
    private final Traffic traffic;

    GrpcTraffic(Traffic traffic) {
        this.traffic = traffic;
    }

    @Override
    public <A, B> ServerCall.Listener<A> interceptCall(
            ServerCall<A, B> call, Metadata headers, ServerCallHandler<A, B> next) {
        Call<A, B> counted = new Call<>(call);
        return counted.listen(next.startCall(counted, headers));
    }

    private final class Call<A, B> extends SimpleForwardingServerCall<A, B> {
        private final AtomicInteger reservedBytes = new AtomicInteger();
        private volatile boolean rejected;
        private volatile long received; // when the request was complete

        Call(ServerCall<A, B> call) {
            super(call);
        }

        ServerCall.Listener<A> listen(ServerCall.Listener<A> listener) {
            return new SimpleForwardingServerCallListener<A>(listener) {
                @Override
                public void onMessage(A message) {
                    int bytes = ((MessageLite) message).getSerializedSize();
                    if (Limits.IN_FLIGHT_BYTES.tryAcquire(bytes)) {
                        reservedBytes.addAndGet(bytes);
                        super.onMessage(message);
                    } else {
                        rejected = true;
                        close(Status.RESOURCE_EXHAUSTED.withDescription(Limits.EXCEEDED), new Metadata());
                    }
                }

                @Override
                public void onHalfClose() {
                    received = System.nanoTime();
                    if (!rejected) {
                        super.onHalfClose();
                    }
                }

                /** The request of a cancelled call stays in TorchServe's queue. */
                @Override
                public void onCancel() {
                    GlobalEventExecutor.INSTANCE.schedule(Call.this::release, Limits.RESPONSE_S, TimeUnit.SECONDS);
                    super.onCancel();
                }
            };
        }

        /** TorchServe calls this before it responds, and does not respond to a cancelled call. */
        @Override
        public boolean isCancelled() {
            boolean cancelled = super.isCancelled();
            if (cancelled) {
                release();
            }
            return cancelled;
        }

        @Override
        public void close(Status status, Metadata trailers) {
            release();
            if (status.isOk() && "Predictions".equals(getMethodDescriptor().getBareMethodName())) {
                traffic.predictionSucceeded(received);
            }
            super.close(status, trailers);
        }

        private void release() {
            Limits.IN_FLIGHT_BYTES.release(reservedBytes.getAndSet(0));
        }
    }
}
