package evernear;

import io.netty.channel.ChannelDuplexHandler;
import io.netty.channel.ChannelHandlerContext;
import io.netty.channel.ChannelPromise;
import io.netty.channel.socket.ChannelInputShutdownEvent;
import io.netty.channel.socket.DuplexChannel;
import io.netty.handler.codec.DecoderException;
import io.netty.handler.codec.http.HttpMethod;
import io.netty.handler.codec.http.HttpObjectAggregator;
import io.netty.handler.codec.http.HttpRequest;
import io.netty.handler.codec.http.HttpResponse;
import io.netty.handler.codec.http.HttpResponseEncoder;
import io.netty.handler.codec.http.HttpResponseStatus;
import io.netty.handler.codec.http.HttpUtil;
import io.netty.handler.codec.http.LastHttpContent;
import io.netty.util.ReferenceCountUtil;
import java.io.IOException;
import java.util.concurrent.ScheduledFuture;
import java.util.concurrent.TimeUnit;

/**
 * One connection. It reads a request after the response to the previous request, has a timeout for each state, and
 * closes without losing a response.
 */
final class Connection extends ChannelDuplexHandler {
    private static final int LINGER_S = 30; // time for the client to read the last response and close its side

    private enum State {
        IDLE, // waiting for the head of the next request
        RECEIVING, // receiving the body
        RESPONDING,
        CLOSING // reading and discarding, because unread bytes would cause a reset that can overtake the response
    }

    private final Traffic traffic;
    private final Requests requests = new Requests();
    private volatile State state = State.IDLE; // changed only on the connection's thread
    private HttpRequest request;
    private long received; // when the request was complete
    private boolean responded;
    private boolean last; // whether the response has Connection: close
    private long deadline; // end of the state's timeout
    private ScheduledFuture<?> timer; // due at the deadline or before

    Connection(Traffic traffic) {
        this.traffic = traffic;
    }

    Requests decoder() {
        return requests;
    }

    HttpResponseEncoder encoder() {
        return new HttpResponseEncoder() {
            @Override
            protected boolean isContentAlwaysEmpty(HttpResponse response) {
                return request != null && request.method().equals(HttpMethod.HEAD)
                        || super.isContentAlwaysEmpty(response);
            }
        };
    }

    /** Whether a request has no response yet. */
    boolean isBusy() {
        return state == State.RECEIVING || state == State.RESPONDING;
    }

    @Override
    public void channelActive(ChannelHandlerContext context) {
        traffic.add(this);
        enter(State.IDLE, Limits.IDLE_S, context);
        context.fireChannelActive();
    }

    @Override
    public void channelInactive(ChannelHandlerContext context) {
        timer.cancel(false);
        traffic.remove(this);
        context.fireChannelInactive();
    }

    @Override
    public void channelRead(ChannelHandlerContext context, Object message) {
        if (state == State.CLOSING) {
            ReferenceCountUtil.release(message);
            return;
        }
        if (message instanceof HttpRequest) {
            request = (HttpRequest) message;
            responded = false;
            enter(State.RECEIVING, Limits.UPLOAD_S, context);
        }
        if (message instanceof LastHttpContent) {
            requests.pause();
            received = System.nanoTime();
            enter(State.RESPONDING, Limits.RESPONSE_S, context);
        }
        context.fireChannelRead(message);
    }

    @Override
    public void write(ChannelHandlerContext context, Object message, ChannelPromise promise) {
        if (message instanceof HttpResponse && !isContinue(message)) {
            begin((HttpResponse) message);
        }
        if (isEndOfResponse(message)) {
            promise = promise.unvoid();
            promise.addListener(written -> finish(context, written.isSuccess()));
        }
        context.write(message, promise);
    }

    /** Whether the message completes a response other than 100 (Continue). */
    static boolean isEndOfResponse(Object message) {
        return message instanceof LastHttpContent && !isContinue(message);
    }

    private static boolean isContinue(Object message) {
        return message instanceof HttpResponse
                && ((HttpResponse) message).status().equals(HttpResponseStatus.CONTINUE);
    }

    private void begin(HttpResponse response) {
        responded = true;
        if (traffic.isDraining() || request == null || !HttpUtil.isKeepAlive(request)) {
            HttpUtil.setKeepAlive(response, false);
        }
        last = !HttpUtil.isKeepAlive(response);
        boolean isPrediction = request != null && request.uri().startsWith("/predictions/");
        if (isPrediction && response.status().equals(HttpResponseStatus.OK)) {
            traffic.predictionSucceeded(received);
        }
    }

    private void finish(ChannelHandlerContext context, boolean written) throws Exception {
        if (!written) {
            context.close();
        } else if (last || state != State.RESPONDING) {
            close(context, context.newPromise());
        } else {
            enter(State.IDLE, Limits.IDLE_S, context);
            requests.next();
        }
    }

    /** Closes our side, and the connection once the client has closed its side. */
    @Override
    public void close(ChannelHandlerContext context, ChannelPromise promise) throws Exception {
        context.channel().closeFuture().addListener(closed -> promise.trySuccess());
        if (state == State.CLOSING || !context.channel().isActive()) {
            return;
        }
        enter(State.CLOSING, LINGER_S, context);
        if (context.pipeline().get(HttpObjectAggregator.class) != null) {
            context.pipeline().remove(HttpObjectAggregator.class); // together with the part of a body that it contains
        }
        ((DuplexChannel) context.channel()).shutdownOutput();
        requests.discard();
    }

    @Override
    public void userEventTriggered(ChannelHandlerContext context, Object event) {
        if (event == ChannelInputShutdownEvent.INSTANCE) {
            if (state == State.RECEIVING && !responded) {
                reject(context, HttpResponseStatus.BAD_REQUEST, "BadRequest", "The request ends before its body does.");
            } else if (state != State.RESPONDING) {
                context.close();
            }
        }
        context.fireUserEventTriggered(event);
    }

    @Override
    public void exceptionCaught(ChannelHandlerContext context, Throwable fault) {
        if (fault instanceof IOException) {
            context.close(); // the client has disconnected
        } else if (fault instanceof DecoderException && isBusy() && !responded) {
            reject(context, HttpResponseStatus.BAD_REQUEST, "BadRequest", "The request's body cannot be read.");
        } else {
            context.fireExceptionCaught(fault);
        }
    }

    /** Moves the deadline. Moves the timer only if it would be late, because setting a timer is expensive. */
    private void enter(State next, long limitSeconds, ChannelHandlerContext context) {
        state = next;
        deadline = System.nanoTime() + TimeUnit.SECONDS.toNanos(limitSeconds);
        if (timer == null || timer.getDelay(TimeUnit.NANOSECONDS) > deadline - System.nanoTime()) {
            setTimer(context);
        }
    }

    private void setTimer(ChannelHandlerContext context) {
        if (timer != null) {
            timer.cancel(false);
        }
        long remaining = deadline - System.nanoTime();
        timer = context.executor().schedule(() -> expire(context), remaining, TimeUnit.NANOSECONDS);
    }

    private void expire(ChannelHandlerContext context) {
        if (deadline - System.nanoTime() > 0) {
            setTimer(context);
            return;
        }
        if (state == State.RECEIVING && !responded) {
            reject(
                    context,
                    HttpResponseStatus.REQUEST_TIMEOUT,
                    "TooSlow",
                    "The request's body did not arrive within " + Limits.UPLOAD_S + " s.");
        } else {
            context.close();
        }
    }

    private static void reject(ChannelHandlerContext context, HttpResponseStatus status, String type, String message) {
        context.channel().writeAndFlush(new RejectedException(status, type, message).response());
    }
}
